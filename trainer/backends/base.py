"""Defines the interface of a training backend.

Implementations: megatron (`trainer/megatron`), fsdp (`trainer/fsdp`), reference (plain torch, the oracle) and
scripted (dry runs).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from protocol.errors import SettingsError
from protocol.messages import StepReport
from protocol.weights.lora import NO_ADAPTERS, AdapterTarget, LoraConfig
from trainer.backends.early_export import EarlyExport, Tensors
from trainer.backends.last_states import LastStates
from trainer.config import AlgorithmConfig
from trainer.ranks.publication import Publication

if TYPE_CHECKING:  # processes that read settings import the registry, which must not import torch
    import torch

    from trainer.batch import Batch
    from trainer.storage.host_state import HostState


NOTHING_TRAINED = "no token of the batch is within the bound and trained"
"""Reason for skipping a step without trained tokens."""
Replicas = Sequence[Sequence[int]]
"""Ranks of each data-parallel replica of a model, rank 0 in the first replica. The replicas divide a batch.
"""


class StepStats(StepReport, tag="step_stats", frozen=True, kw_only=True):
    """Measurements of an optimizer update or of a step, reduced over all ranks; equal on every rank.

    They are the fields of a step's report that its updates determine. The batch plan and the trainer's clock
    determine the other fields.
    """

    step: int = -1
    version: int = -1
    epoch: str = ""
    reward_mean: float = 0.0
    sums: tuple[float, ...] = ()
    """Sums from which `StepMeasures` computed the measurements of an update; not reported."""

    def measured(self) -> dict[str, Any]:
        """Return the fields of the report that were measured."""
        names = [name for name in StepReport.__struct_fields__ if getattr(self, name) != getattr(NONE, name)]
        return {name: getattr(self, name) for name in names}

    def with_critic(self, critic: StepStats) -> StepStats:
        """Return the statistics of the policy's update merged with those of the concurrent critic update."""
        peaks = [peak for peak in (self.memory_peak_gb, critic.memory_peak_gb) if peak is not None]
        both = {
            "memory_peak_gb": max(peaks, default=None),
            "warnings": self.warnings + critic.warnings,
        }
        return msgspec.structs.replace(self, **critic.measured() | both)


NONE = StepStats()


@dataclass(frozen=True, slots=True)
class FrozenSpec:
    """Specification of a frozen model: reference, teacher or reward model."""

    role: str
    """Section of the model's settings, such as "teacher"."""
    directory: Path
    """Hugging Face directory."""
    offload: bool = False
    """Whether the model is in host memory between its passes."""
    is_remote: bool = False
    """Whether the model has ranks of its own, so the policy's ranks do not load it."""
    is_classifier: bool = False
    """Whether the model scores samples instead of computing log-probabilities of tokens."""


def reference_is_copy(algorithm: AlgorithmConfig, adapters: LoraConfig, frozen: Sequence[FrozenSpec]) -> bool:
    """Return whether the reference model is a copy of the policy's initial weights.

    Otherwise no reference is needed, a path names another model, or the reference is the frozen base of
    adapters.
    """
    has_reference_spec = any(spec.role == "reference" for spec in frozen)
    return algorithm.kl_coef > 0 and not adapters.rank and not has_reference_spec


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A rank's shard of a frozen model, in the layout of the policy or on ranks of its own."""

    evaluate: Callable[[Batch], torch.Tensor]
    """Returns a number for each token of a batch, float32 [t] on the CPU. A collective.

    The numbers are log-probabilities, as in `Backend.logprobs`, or the scores of a classifier, as in
    `score_rows`."""
    tensors: Sequence[torch.Tensor]
    """All tensors of the model on the device."""


class TrainableModel(ABC):
    """A model under training. Every rank calls every method in the same order (collectives inside)."""

    @abstractmethod
    def train_step(self, batch: Batch) -> StepStats:
        """Make one optimizer update with `batch`, the part of this rank's replica.

        A step may have several updates; `batch.totals` are the totals of the update.
        """

    @abstractmethod
    def copy_state(self) -> HostState:
        """Return this rank's shard of a checkpoint (parameters, optimizer, RNG), copied to host memory.

        The model may change afterwards. The copies are valid until the next call.
        """

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """Load this rank's shard of a checkpoint of any supported layout, bit for bit.

        Raises:
            SettingsError: model or layout of the checkpoint do not fit; the message names both sides.
        """

    @abstractmethod
    def offload(self) -> int:
        """Move all training state from the device to the host, and return the number of bytes.

        Until `onload` only `close` may be called.

        Raises:
            SettingsError: an engine reads the masters, which stay on the device.
        """

    @abstractmethod
    def onload(self) -> None:
        """Move the offloaded state back to the device, bit for bit; return at once if it is already there.

        Raises:
            TetherError: the device has too little free memory; the state stays on the host.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the model and leave the process groups; idempotent."""


class Backend(TrainableModel):
    """The policy under training."""

    architecture: str
    """Name in the model's config.json, for the manifest."""
    lora: LoraConfig = NO_ADAPTERS
    """With a rank above 0, only adapters are trained."""
    targets: Sequence[AdapterTarget] = ()
    """Weights with an adapter."""
    replicas: Replicas = ((0,),)
    extra_tensors: Mapping[str, torch.Tensor] = MappingProxyType({})
    """Tensors of a draft head, which versions contain after the model's tensors; with one rank only."""

    def costs(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the relative cost, float64 [N], of sequences by length, int64 [N]; length 0 costs 0."""
        return lengths.double()

    @property
    def shares_prefixes(self) -> bool:
        """Whether a common prefix of samples in a group is computed once."""
        return False

    @property
    def device_name(self) -> str:
        """Name of this rank's GPU; empty on a CPU."""
        return ""

    def flops(self, lengths: torch.Tensor, shared: torch.Tensor, trained: int) -> float | None:
        """Return the FLOPs that the model needs to train a whole step's batch; None: not counted.

        Args:
            lengths: tokens of each sample, int64 [N].
            shared: prefix tokens of each sample that are computed with another sample, int64 [N].
            trained: number of tokens that carry gradient.
        """
        return None

    @abstractmethod
    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the log-probabilities of a replica's part under the current weights, on each of its ranks.

        float32 [t] on the CPU, at the batch's temperature; 0 where not sampled.
        """

    @abstractmethod
    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the batch's log-probabilities under the weights of `keep_reference`."""

    @abstractmethod
    def keep_reference(self) -> None:
        """Keep the current weights as the reference model: a copy, or the frozen base of adapters itself.

        Called before the first step, and before `restore`, if `kl_coef` > 0 and no other reference is set.
        """

    def load_frozen(self, spec: FrozenSpec) -> FrozenModel:
        """Load a frozen model in the layout, dtype and device of the policy.

        Raises:
            SettingsError: the model cannot be loaded, or the backend has no models; the message names the
                setting.
        """
        raise SettingsError(
            f"setting {spec.role}.path: {type(self).__name__} computes no log-probabilities of a model; "
            "choose another trainer.backend"
        )

    def last_states(self, batch: Batch) -> LastStates:
        """Return the hidden states of a batch's tokens, for a draft head; with one rank only.

        Raises:
            torch.OutOfMemoryError: the policy can continue to train.
        """
        raise NotImplementedError(f"{type(self).__name__} trains no draft head")

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        raise NotImplementedError(f"{type(self).__name__} has no device")

    @abstractmethod
    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the trained tensors on rank 0, in a fixed order; every rank exhausts the iterator.

        The tensors are full: the model's under Hugging Face names, or its adapters' A and B under PEFT's
        names.
        """

    def export_ahead(self, begin: Callable[[Tensors], None] | None, updates: int) -> EarlyExport:
        """Prepare to export the next version during the last update of the step, if supported.

        Args:
            begin: see `EarlyExport`; called at most once, and not if an update is skipped. None: no early
                export.
            updates: number of `train_step` calls in the step.

        Returns:
            The export, whose `step` block must enclose the step.
        """
        return EarlyExport()

    @property
    def publication(self) -> Publication:
        """Pieces that each rank publishes without a gather; by default rank 0 has all exported tensors."""
        return Publication.by_rank_0({name: tuple(tensor.shape) for name, tensor in self.export()})

    def pieces(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's part of `publication`: each piece with its tensor's name, as a view or a copy."""
        return self.export()

    def export_model(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the whole model, adapters merged, each on the one rank that writes the tensor.

        Every rank exhausts the iterator; with several ranks, no rank gets all tensors.
        """
        return self.export()

    def masters(self) -> Mapping[str, torch.Tensor]:
        """Return the dense fp32 tensors that the optimizer steps, by name.

        Transport `shared` moves the masters to memory that the engine reads, so their owner must read `.data`
        at each use.

        Raises:
            SettingsError: this backend cannot share its weights with an engine.
        """
        raise SettingsError(
            f"setting weights.transport: {type(self).__name__} does not share weights with an engine "
            "(trainer.backend)"
        )

    def master_parts(self) -> Mapping[str, torch.Tensor]:
        """Return views of the masters' current memory as the tensors of `export`, in its order.

        Shapes follow `matches_layout`. With several ranks, each rank has parts of tensors.
        """
        return self.masters()

    def attach(self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Compute with an engine's live weights from now on. Only the engine writes to these weights.

        Args:
            parameters: the engine's weights by the names of this model's parameters; their bytes must equal
                the rounded masters.
            buffers: the engine's other tensors that enter the computation.

        Raises:
            SettingsError: a tensor does not fit this model; the message names the tensor.
            WeightError: a tensor has other values; the message names the tensor. After either error, the
                model is unchanged.
        """
        raise SettingsError(
            f"setting weights.transport: {type(self).__name__} does not share weights with an engine "
            "(trainer.backend)"
        )
