"""Predicts a rank's peak device memory in a step of sharded models. Does not import torch.

The prediction uses only the shapes of the checkpoint's tensors. Tensors with the same number in their names,
such as `model.layers.3.`, form a layer. A pass gathers one layer at a time; all other tensors stay gathered.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from math import ceil, prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from protocol.device.checkpoint_shapes import tensor_shapes
from protocol.host.json_file import read_object
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from trainer.backends.base import FrozenSpec, reference_is_copy
from trainer.config import AlgorithmConfig, OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.fsdp.layout import KNOWN_TYPES, plan_of, style_of
from trainer.layers.limits import LOGITS_MOST_BYTES
from trainer.memory.expected import ITEM_BYTES, ExpectedMemory

KEPT = 2.0
"""Activations that a layer keeps per token, relative to the inputs and outputs of its matrices. Measured: 1.2
to 1.9."""
KEPT_WITH_STATE = {(0, 0): (1.0, 2.5), (5, 19): (3.0, 0.0)}
"""Minimum transformers version -> `KEPT` of models with layers other than attention, in the dtype of the
passes and in float32. Measured in total: 1.7 to 2.8 with 5.19; 3.2 with 5.12, whose states are float32."""
KEPT_COMPILED = 1.0
"""`KEPT` of compiled layers without experts. Measured: 0.75 to 0.9."""
GATHERED = 3
"""Layers whose parameters are on the device at the same time: the current layer, and the next with its
buffer."""
STAYS_BYTES = 4 << 30
"""Gathered parameters up to this size, bytes, stay on a single rank between passes."""
FLOAT32 = 4
LAYER = re.compile(r".*?\.\d+\.")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of config.json for the number of experts per layer."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a tensor-parallel rank's shard of a model, in elements."""

    whole: int
    """Parameters of the whole model."""
    parameters: int
    layer: int
    """Parameters of the largest layer."""
    outside: int
    """Parameters outside the layers."""
    table: int
    """Parameters of the output layer."""
    kept: int
    """Inputs and outputs of all layers' matrices, per token."""
    kept_of_layer: int
    layers: int
    hidden: int
    vocabulary: int
    has_state: bool
    """Whether the model has layers other than attention."""
    has_experts: bool = False

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        config: Mapping[str, Any],
        plan: Mapping[str, str] = MappingProxyType({}),
        ranks: int = 1,
    ) -> "ModelSize":
        """Return the sizes of a model.

        Args:
            shapes: name -> shape of the checkpoint's tensors.
            plan: tensor-parallel plan of transformers.
        """
        config = config.get("text_config") or config
        experts = next((config[name] for name in EXPERTS if config.get(name)), 0)
        share = (config.get("num_experts_per_tok") or experts) / experts if experts else 1.0
        sizes: dict[str, int] = {}
        kept: dict[str, float] = {}
        for name, shape in shapes.items():
            found = LAYER.match(name)
            layer = found.group() if found else ""
            style = style_of(name, plan) if ranks > 1 else ""
            sizes[layer] = sizes.get(layer, 0) + prod(shape) // (ranks if style else 1)
            kept[layer] = kept.get(layer, 0.0) + _stored_per_token(name, shape, share, _parts(style, ranks))
        outside = sizes.pop("", 0)
        kept.pop("", None)
        hidden, vocabulary = int(config.get("hidden_size") or 0), int(config.get("vocab_size") or 0)
        return cls(
            whole=sum(map(prod, shapes.values())),
            parameters=outside + sum(sizes.values()),
            layer=max(sizes.values(), default=0),
            outside=outside,
            table=hidden * vocabulary,
            kept=ceil(sum(kept.values())),
            kept_of_layer=ceil(max(kept.values(), default=0.0)),
            layers=len(sizes),
            hidden=hidden,
            vocabulary=vocabulary,
            has_state=bool(set(config.get("layer_types") or ()) - KNOWN_TYPES),
            has_experts=bool(experts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedWorkload:
    """Facts that determine the memory of a rank."""

    model: ModelSize
    parallel: ParallelConfig
    trainer: TrainerConfig
    optimizer: OptimizerConfig
    adapters: LoraConfig = NO_ADAPTERS
    others: tuple[int, ...] = ()
    """Parameters of each frozen model, including the reference model."""
    critic: ModelSize | None = None
    """Critic trained on the same ranks; its passes follow the policy's."""

    @property
    def models(self) -> tuple[ModelSize, ...]:
        """Trained models, the policy first."""
        return (self.model,) if self.critic is None else (self.model, self.critic)

    @property
    def stepped(self) -> int:
        """Trained parameters of all models, over all data-parallel ranks."""
        return _adapters(self.model, self.adapters) + (self.critic.parameters if self.critic else 0)

    def expected(self, tokens: int) -> ExpectedMemory:
        """Return the expected memory of a step with `tokens` tokens per pass."""
        models, trained = self.models, self.stepped
        item, ranks = ITEM_BYTES[self.trainer.dtype], self.parallel.data_parallel_size
        held = not self.trainer.offload_parameters
        frozen = self.model.parameters if self.adapters.rank else 0
        shards = FLOAT32 * (trained + frozen) * held + item * sum(self.others)
        return ExpectedMemory(
            parameters=ceil(shards / ranks) + max(self._gathered(one) for one in models) * item,
            gradients=ceil(FLOAT32 * trained * held / ranks),
            optimizer=0 if self.optimizer.cpu_offload else ceil(2 * FLOAT32 * trained / ranks),
            activations=max(self._stored_elements(one, tokens) for one in models) * item,
            head=_head(self.model, tokens, item, trained=not self.adapters.rank),
            workspace=max(self._workspace(one, tokens, item) for one in models),
            update=0,
        )

    def alternatives(self) -> Iterator[tuple[str, "ShardedWorkload"]]:
        """Yield settings that need less memory, each with the resulting run, the cheapest first."""
        recomputes = ('trainer.recompute_granularity = "full"', {"recompute_granularity": "full"})
        steps: tuple[str, dict[str, Any]] = ("optimizer.cpu_offload = true", {})
        shards = ("trainer.offload_parameters = true", {"offload_parameters": True})
        for chosen in ((recomputes,), (steps,), (recomputes, steps), (recomputes, steps, shards)):
            trainer: dict[str, Any] = {key: value for _, change in chosen for key, value in change.items()}
            changed = dataclasses.replace(
                self,
                trainer=dataclasses.replace(self.trainer, **trainer),
                optimizer=dataclasses.replace(
                    self.optimizer, cpu_offload=self.optimizer.cpu_offload or steps in chosen
                ),
            )
            if changed != self:
                yield " and ".join(name for name, _ in chosen), changed

    def _gathered(self, model: ModelSize) -> int:
        """Return the number of parameters that are gathered at the same time."""
        nbytes, ranks = model.parameters * ITEM_BYTES[self.trainer.dtype], self.parallel.data_parallel_size
        if stays_gathered(nbytes, ranks, self.trainer):
            return model.parameters
        return model.outside + GATHERED * model.layer

    def _stored_elements(self, model: ModelSize, tokens: int) -> int:
        """Return the number of elements that forward passes keep."""
        if self.trainer.recompute_granularity == "full":
            return tokens * model.hidden * model.layers
        return ceil(tokens * model.kept * self._factor(model))

    def _factor(self, model: ModelSize) -> float:
        """Return the activations relative to the matrices' inputs and outputs; dropout copies the inputs."""
        kept = KEPT
        if model.has_state:
            plain, float32 = KEPT_WITH_STATE[max(one for one in KEPT_WITH_STATE if one <= _transformers())]
            kept = plain + float32 * FLOAT32 / ITEM_BYTES[self.trainer.dtype]
        if self.trainer.compile and self.trainer.fp8 == "off" and not (model.has_state or model.has_experts):
            kept = KEPT_COMPILED
        return kept + (1.0 if self.adapters.dropout else 0.0)

    def _workspace(self, model: ModelSize, tokens: int, item: int) -> int:
        """Return the bytes of a layer's backward pass: recomputed activations and unreduced gradients."""
        again = self.trainer.recompute_granularity == "full"
        values = tokens * model.kept_of_layer * (self._factor(model) if again else 1)
        gradients = 0 if self.adapters.rank else model.layer + model.outside
        # values are float32 before rounding to FP8
        rounded = 0 if self.trainer.fp8 == "off" else FLOAT32 * (tokens * model.kept_of_layer + model.layer)
        return ceil(values * item) + gradients * (item + FLOAT32) + rounded


@functools.cache
def _transformers() -> tuple[int, ...]:
    """Return (major, minor) of the installed transformers."""
    return tuple(map(int, version("transformers").split(".")[:2]))


def stays_gathered(nbytes: int, data_ranks: int, trainer: TrainerConfig) -> bool:
    """Return whether a model's parameters stay gathered between passes.

    Otherwise each layer is gathered twice per pass; with a single data-parallel rank, this is a copy.

    Args:
        nbytes: size of a tensor-parallel rank's parameters in the dtype of the passes.
        data_ranks: number of ranks that shard the model.
    """
    return data_ranks == 1 and not trainer.offload_parameters and nbytes <= STAYS_BYTES


def _parts(style: str, ranks: int) -> tuple[int, int]:
    """Return the numbers of parts into which tensor-parallel ranks divide kept outputs and inputs."""
    return ranks if style.endswith("colwise") else 1, ranks if style.endswith("rowwise") else 1


def _stored_per_token(name: str, shape: tuple[int, ...], share: float, parts: tuple[int, int]) -> float:
    """Return the inputs and outputs of a matrix per token; `share` is the active share of experts."""
    if len(shape) < 2:
        return 0.0
    both = shape[-2] / parts[0] + shape[-1] / parts[1]
    if ".experts." not in name:
        return both if len(shape) == 2 else 0.0
    return share * both * prod(shape[:-2])


def _adapters(model: ModelSize, adapters: LoraConfig) -> int:
    """Return the number of trained parameters of a policy, assuming adapters on all matrices."""
    return adapters.rank * model.kept if adapters.rank else model.parameters


def _head(model: ModelSize, tokens: int, item: int, *, trained: bool) -> int:
    """Return the bytes of logits and their gradients, for models that do not change the logits."""
    logits = min(tokens * model.vocabulary * item, LOGITS_MOST_BYTES)
    return logits + (model.table * item if trained else 0) + 2 * tokens * model.hidden * item


def read_workload(
    model_dir: Path,
    parallel: ParallelConfig,
    trainer: TrainerConfig,
    optimizer: OptimizerConfig,
    adapters: LoraConfig,
    algorithm: AlgorithmConfig,
    frozen: Sequence[FrozenSpec],
    critic_dir: Path | None,
) -> ShardedWorkload:
    """Return the workload of a run from its model directories; arguments as in `make_backend`.

    Raises:
        SettingsError: a file cannot be read.
    """
    ranks = parallel.tensor_model_parallel_size
    policy = read_size(model_dir, ranks)
    others = [read_size(spec.directory, ranks).parameters for spec in frozen if not spec.is_remote]
    if reference_is_copy(algorithm, adapters, frozen):
        others.append(policy.parameters)
    return ShardedWorkload(
        model=policy,
        parallel=parallel,
        trainer=trainer,
        optimizer=optimizer,
        adapters=adapters,
        others=tuple(others),
        critic=read_size(critic_dir, ranks) if critic_dir else None,
    )


def read_size(model_dir: Path, ranks: int = 1) -> ModelSize:
    """Return the sizes of a tensor-parallel rank's shard of the model in a Hugging Face directory.

    Raises:
        SettingsError: a file cannot be read.
    """
    config = read_object(model_dir / "config.json", f"{model_dir}: config.json")
    return ModelSize.of(tensor_shapes(model_dir), config, plan_of(config) if ranks > 1 else {}, ranks)
