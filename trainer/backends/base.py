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

if TYPE_CHECKING:  # the registry, which every reader of settings imports, must not import torch
    import torch

    from trainer.batch import Batch
    from trainer.storage.host_state import HostState


NOTHING_TRAINED = "no token of the batch is within the bound and in a sample that is trained"
"""Why a step is skipped of which no token carries gradient."""
Replicas = Sequence[Sequence[int]]
"""Ranks of each data-parallel replica of a model; rank 0 is in the first one. A batch is cut between them."""


class StepStats(StepReport, tag="step_stats", frozen=True, kw_only=True):
    """Measurements of an optimizer update, or of a step, reduced over all ranks; equal on every rank.

    They are a step's report with the fields that its updates decide; the batch's plan and the trainer's clock
    have the others.
    """

    step: int = -1
    version: int = -1
    epoch: str = ""
    reward_mean: float = 0.0
    sums: tuple[float, ...] = ()
    """What `StepMeasures` made the numbers of an update from; not reported."""

    def measured(self) -> dict[str, Any]:
        """Return the fields of the report that were measured."""
        names = [name for name in StepReport.__struct_fields__ if getattr(self, name) != getattr(NONE, name)]
        return {name: getattr(self, name) for name in names}

    def with_critic(self, critic: StepStats) -> StepStats:
        """Return the statistics of the policy's update with the critic's, which was made at the same time."""
        peaks = [peak for peak in (self.memory_peak_gb, critic.memory_peak_gb) if peak is not None]
        both = {
            "memory_peak_gb": max(peaks, default=None),
            "warnings": self.warnings + critic.warnings,
        }
        return msgspec.structs.replace(self, **critic.measured() | both)


NONE = StepStats()


@dataclass(frozen=True, slots=True)
class FrozenSpec:
    """A model other than the policy, which is never trained."""

    role: str
    """Section of the settings that names it, such as "teacher"."""
    directory: Path
    """Hugging Face directory."""
    offload: bool = False
    """Whether it is in host memory between its passes."""
    apart: bool = False
    """Whether it has ranks of its own, so that the policy's ranks do not load it."""
    is_classifier: bool = False
    """Whether it scores samples, in place of giving log-probabilities of tokens."""


def keeps_copy(algorithm: AlgorithmConfig, adapters: LoraConfig, frozen: Sequence[FrozenSpec]) -> bool:
    """Return whether the reference model is a copy of the policy's first weights.

    It is not where a path names another model, and not under adapters, whose frozen base it is.
    """
    given = any(spec.role == "reference" for spec in frozen)
    return algorithm.kl_coef > 0 and not adapters.rank and not given


@dataclass(frozen=True, slots=True)
class FrozenModel:
    """A rank's part of a model that is never trained, in the layout of the policy or of ranks of its own."""

    evaluate: Callable[[Batch], torch.Tensor]
    """Returns a number for each token of a batch, float32 [t] on the CPU. A collective.

    The log-probabilities under this model, as `Backend.logprobs` does, or the scores of a classifier, as
    `score_rows` does.
    """
    tensors: Sequence[torch.Tensor]
    """Everything that it has on the device."""


class TrainableModel(ABC):
    """A model under training. Every method is called on every rank in the same order (collectives inside)."""

    @abstractmethod
    def train_step(self, batch: Batch) -> StepStats:
        """Make one optimizer update; `batch` is the part of it that this rank's replica works on.

        `batch.totals` are the update's. There may be several in a step.
        """

    @abstractmethod
    def copy_state(self) -> HostState:
        """Return this rank's part of a checkpoint (parameters, optimizer, RNG), copied to host memory.

        The model may change then; the copies are valid until the next call.
        """

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """Load what this rank has of the checkpoint of any layout that the model can have, bit for bit.

        Raises:
            SettingsError: the checkpoint is of another model, or of a layout that cannot be read; names both.
        """

    @abstractmethod
    def offload(self) -> int:
        """Move everything that training has on the device to the host, and return the number of bytes.

        Until `onload` only `close` may be called.

        Raises:
            SettingsError: an engine reads the masters; they stay on the device.
        """

    @abstractmethod
    def onload(self) -> None:
        """Move what `offload` moved back to the device, bit for bit; return at once if they are there.

        Raises:
            TetherError: the device has no room for it; the state stays on the host.
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
    """The weights that have an adapter."""
    replicas: Replicas = ((0,),)
    extra_tensors: Mapping[str, torch.Tensor] = MappingProxyType({})
    """Tensors that versions have after the model's, a draft head's; on one rank alone."""

    def costs(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return what sequences of these lengths (int64 [N]) cost, float64 [N], in any unit; 0 costs 0."""
        return lengths.double()

    @property
    def shares_prefixes(self) -> bool:
        """Whether tokens that samples of a group begin with alike are computed once."""
        return False

    @property
    def device_name(self) -> str:
        """Name of this rank's GPU; empty where the model is on a CPU."""
        return ""

    def flops(self, lengths: torch.Tensor, shared: torch.Tensor, trained: int) -> float | None:
        """Return the FLOPs that the model needs to train a whole step's batch; None if that is not counted.

        Args:
            lengths: tokens of each sample, int64 [N].
            shared: tokens at its start that are computed with another sample, int64 [N].
            trained: tokens that carry gradient.
        """
        return None

    @abstractmethod
    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the log-probabilities of a replica's part under the current weights, on each of its ranks.

        float32 [t] on the CPU, at the batch's temperature; 0 where not sampled.
        """

    @abstractmethod
    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the batch's log-probabilities under the weights that `keep_reference` kept."""

    @abstractmethod
    def keep_reference(self) -> None:
        """Keep the current weights as the reference model: a copy, or under adapters the frozen base itself.

        Called before the first step, and before `restore`, if `kl_coef` > 0 and no other reference is given.
        """

    def load_frozen(self, spec: FrozenSpec) -> FrozenModel:
        """Load a model that is never trained, in the layout, dtype and device of this one.

        Raises:
            SettingsError: it cannot be loaded, or this backend has no models; names the setting.
        """
        raise SettingsError(
            f"setting {spec.role}.path: {type(self).__name__} computes no log-probabilities of a model; "
            "choose another trainer.backend"
        )

    def last_states(self, batch: Batch) -> LastStates:
        """Return the hidden states of a batch's tokens, for a draft head; on one rank alone.

        Raises:
            torch.OutOfMemoryError: the policy can train on.
        """
        raise NotImplementedError(f"{type(self).__name__} trains no draft head")

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        raise NotImplementedError(f"{type(self).__name__} has no device")

    @abstractmethod
    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the trained tensors, on rank 0, as full tensors in a fixed order; every rank exhausts it.

        These are the model's tensors under their Hugging Face names, or A and B of its adapters under PEFT's.
        """

    def export_ahead(self, begin: Callable[[Tensors], None] | None, updates: int) -> EarlyExport:
        """Prepare to export the version of the next step while its last update is made, if that can be.

        Args:
            begin: see `EarlyExport`; called once at most, and not if an update is skipped. None: no such
                export.
            updates: of the step, calls of `train_step`.

        Returns:
            What the step has to be made within.
        """
        return EarlyExport()

    @property
    def publication(self) -> Publication:
        """What each rank publishes without a gather; by default rank 0 has all that is exported."""
        return Publication.by_rank_0({name: tuple(tensor.shape) for name, tensor in self.export()})

    def pieces(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's part of `publication`: each piece with its tensor's name, as a view or a copy."""
        return self.export()

    def export_model(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the whole model, adapters merged, each on one rank, which is to write it.

        Every rank exhausts it; of several none gets all.
        """
        return self.export()

    def masters(self) -> Mapping[str, torch.Tensor]:
        """Return the dense fp32 tensors that the optimizer steps, by name.

        Transport `shared` moves them to memory that the engine reads, so their owner must look up `.data` at
        each use.

        Raises:
            SettingsError: this backend cannot share its weights with an engine.
        """
        raise SettingsError(
            f"setting weights.transport: {type(self).__name__} does not share weights with an engine "
            "(trainer.backend)"
        )

    def master_parts(self) -> Mapping[str, torch.Tensor]:
        """Return views of the masters, where they lie now, that are the tensors of `export`, in its order.

        Their shapes are as `matches_layout` says. One of several ranks has parts of tensors.
        """
        return self.masters()

    def attach(self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Compute with an engine's live weights from now on. Steps never write to them: the engine does.

        Args:
            parameters: the engine's weights by the names of this model's parameters; their bytes must be
                those that the masters make.
            buffers: the engine's other tensors that enter the computation.

        Raises:
            SettingsError: the engine's tensors are not what this model computes with; names the tensor.
            WeightError: they are of other weights; names the tensor. Either way nothing changed.
        """
        raise SettingsError(
            f"setting weights.transport: {type(self).__name__} does not share weights with an engine "
            "(trainer.backend)"
        )
