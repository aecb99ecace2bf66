"""Describes a checkpoint's subject: the model, its trained part, and the layout."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from protocol.weights.lora import LoraConfig
from trainer.megatron.convert.reshard import TensorPlan, plan_of
from trainer.megatron.convert.rules import Rule
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.stages import stage_rules
from trainer.megatron.layers.lora import lora_rules
from trainer.megatron.layout import Layout

FORMAT = 1
"""Version of a checkpoint's files."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model under training."""

    architecture: Architecture
    layout: Layout
    dtype: str
    """`trainer.dtype`."""
    adapters: LoraConfig
    distributed: bool
    """Whether data-parallel ranks divide masters and moments."""

    def rules(self, stage: int) -> list[Rule]:
        """Return the rules of the parameters that a stage trains."""
        rules = stage_rules(self.architecture, self.layout, stage)
        return lora_rules(rules, self.adapters) if self.adapters.rank else rules

    def plans(self) -> dict[str, TensorPlan]:
        """Return where each tensor is that is trained, by its Hugging Face name."""
        stages = ((stage, self.rules(stage)) for stage in range(self.layout.pp))
        return {plan.name: plan for plan in plan_of(stages, self.layout)}

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "format": FORMAT,
            "model": asdict(self.architecture),
            "layout": asdict(self.layout) | {"stages": _ends(self.layout)},
            "distributed_optimizer": self.distributed,
            "dtype": self.dtype,
            "lora": self.lora_json(),
        }

    def lora_json(self) -> dict[str, Any] | None:
        """Return the description of adapters; None without. What tensors do not depend on is not in it."""
        if not self.adapters.rank:
            return None
        left_out = "path", "dropout"
        return {name: value for name, value in asdict(self.adapters).items() if name not in left_out}


def read_layout(saved: Mapping[str, Any]) -> Layout:
    """Return the layout of a description.

    Raises:
        ValueError: it is none.
    """
    sizes = dict(saved)
    try:
        stages = tuple(tuple(range(first, end) for first, end in chunks) for chunks in sizes.pop("stages"))
        found = msgspec.convert(sizes, dict[str, int])
        return Layout(**found, stages=stages)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"no layout: {error}") from error


def _ends(layout: Layout) -> list[list[list[int]]]:
    """Return the first layer of each chunk, and the one after its last."""
    return [[[chunk.start, chunk.stop] for chunk in chunks] for chunks in layout.stages]
