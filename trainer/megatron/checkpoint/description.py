"""Describes a checkpoint: model, trained parameters, layout, and the names of its files and tensors."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from protocol.weights.lora import LoraConfig
from trainer.megatron.convert.adapters import lora_rules
from trainer.megatron.convert.reshard import TensorPlan, plan_of
from trainer.megatron.convert.rules import Rule
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.stages import stage_rules
from trainer.megatron.layout import Layout

LAYOUT = "layout.json"
MASTER = "master"
KINDS = (MASTER, "exp_avg", "exp_avg_sq")
"""Tensors of each parameter that the optimizer updates. Adam's moments exist after the first step."""
VALUE = "value"
"""Tensor of a parameter that the optimizer does not update, such as a router's bias."""
STEPS = "steps"
LOSS_SCALE = "loss_scale"
"""(loss scale, steps since its last change); only in float16."""
RANDOM_CPU, RANDOM_CUDA = "random.cpu", "random.cuda"


def rank_file(rank: int) -> str:
    """Return the name of a global rank's file."""
    return f"rank-{rank:05d}.safetensors"


def part_name(kind: str, parameter: str, start: int) -> str:
    """Return the name of a range of a flat parameter or moment that begins at `start`."""
    return f"{kind}/{parameter}/{start}"


def parse_name(name: str) -> tuple[str, str, int] | None:
    """Return (kind, parameter, start); None if the name has another format."""
    kind, _, rest = name.partition("/")
    parameter, _, start = rest.rpartition("/")
    return (kind, parameter, int(start)) if kind in (*KINDS, VALUE) and start.isdigit() else None


FORMAT = 1
"""Version of the checkpoint format."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model under training."""

    architecture: Architecture
    layout: Layout
    dtype: str
    """`trainer.dtype`."""
    adapters: LoraConfig
    distributed: bool
    """Whether masters and moments are sharded over data-parallel ranks."""

    def rules(self, stage: int) -> list[Rule]:
        """Return the rules of the parameters that a stage trains."""
        rules = stage_rules(self.architecture, self.layout, stage)
        return lora_rules(rules, self.adapters) if self.adapters.rank else rules

    def plans(self) -> dict[str, TensorPlan]:
        """Return the source of each trained tensor, by Hugging Face name."""
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
        """Return the adapter settings that determine the tensors; None without adapters."""
        if not self.adapters.rank:
            return None
        left_out = "path", "dropout"
        return {name: value for name, value in asdict(self.adapters).items() if name not in left_out}


def read_layout(saved: Mapping[str, Any]) -> Layout:
    """Return the layout from a description.

    Raises:
        ValueError: the description is invalid.
    """
    sizes = dict(saved)
    try:
        stages = tuple(tuple(range(first, end) for first, end in chunks) for chunks in sizes.pop("stages"))
        found = msgspec.convert(sizes, dict[str, int])
        return Layout(**found, stages=stages)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ValueError(f"no layout: {error}") from error


def _ends(layout: Layout) -> list[list[list[int]]]:
    """Return the first layer and the end of each chunk."""
    return [[[chunk.start, chunk.stop] for chunk in chunks] for chunks in layout.stages]
