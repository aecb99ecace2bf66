"""Defines the interface of a training backend.

Implementations: megatron (`trainer/megatron`), fsdp (`trainer/fsdp`), reference (plain torch, the oracle) and
scripted (dry runs).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import SettingsError
from protocol.messages import Mismatch
from protocol.weights.lora import NO_ADAPTERS, AdapterTarget, LoraConfig
from trainer.backends.early_export import EarlyExport, Tensors
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


@dataclass(frozen=True, slots=True)
class StepStats:
    """Measurements of an optimizer update, or of a step, reduced over all ranks; equal on every rank.

    Names and meanings are as in `StepReport`. None: not measured.
    """

    trained_tokens: int
    """Tokens under the loss mask."""
    skipped: str = ""
    """Why the weights were not changed; empty if they were."""
    loss: float | None = None
    """Weighted sum of the token losses."""
    grad_norm: float | None = None
    """L2 norm of the whole gradient before clipping."""
    entropy: float | None = None
    """Mean over the trained tokens, nats."""
    clip_fraction: float | None = None
    ratio_mean: float | None = None
    logprob_error_max: float | None = None
    behaviour_kl_k3: float | None = None
    reference_kl_k3: float | None = None
    importance_mean: float | None = None
    importance_max: float | None = None
    importance_capped: float | None = None
    importance_rejected: float | None = None
    importance_ess: float | None = None
    behaviour_clip_fraction: float | None = None
    mismatch: dict[int, Mismatch] = field(default_factory=dict)
    mismatch_mean: float | None = None
    mismatch_max: float | None = None
    token_mult_prob_error: float | None = None
    micro_batches: int | None = None
    """Forward passes that the busiest replica made."""
    imbalance: float | None = None
    """By which share the dearest replica's part of the batch costs more than the mean of all."""
    padding_share: float | None = None
    """Share of padding in the tokens of the forward passes, over all replicas."""
    shared_share: float | None = None
    """Share of the samples' tokens that were not computed because another sample's stood for them."""
    computed_tokens: int | None = None
    """Tokens that the forward passes computed, without padding, over all replicas."""
    memory_peak_gb: float | None = None
    """Largest memory that a rank had allocated on its GPU during the step, GiB."""
    memory_expected_gb: float | None = None
    """What was expected of it, with the budget in force."""
    expert_load_max: float | None = None
    """Tokens of the busiest expert of any layer, relative to an even spread."""
    expert_load_min: float | None = None
    """Tokens of the expert with the fewest."""
    loss_scale: float | None = None
    """Factor of the loss that the step was made with; None without one."""
    loss_scale_repeats: int | None = None
    """Times that the step was made again because its gradient overflowed; None without a factor."""
    teacher_kl_k1: float | None = None
    reward_kl_k1: float | None = None
    warnings: tuple[str, ...] = ()
    """What may be wrong with the step, a sentence each."""
    updates: int | None = None
    """Optimizer updates that changed weights; None if not counted."""
    updates_skipped: int | None = None
    """Those that were skipped."""
    lr_scale: float | None = None
    """What `algorithm.ess_scaling` multiplied the learning rate by; None where it is off."""
    entropy_coef: float | None = None
    """Bonus for entropy that the step was made with; None without `algorithm.entropy_target`."""
    sums: tuple[float, ...] = field(default=(), repr=False, compare=False)
    """What `StepMeasures` made the numbers of an update from; not reported."""
    value_loss: float | None = None
    critic_grad_norm: float | None = None
    value_mean: float | None = None
    return_mean: float | None = None
    explained_variance: float | None = None
    value_clip_fraction: float | None = None


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


def keeps_copy(algorithm: AlgorithmConfig, adapters: LoraConfig, frozen: Sequence[FrozenSpec]) -> bool:
    """Return whether the reference model is a copy of the policy's first weights.

    It is not where a path names another model, and not under adapters, whose frozen base it is.
    """
    given = any(spec.role == "reference" for spec in frozen)
    return algorithm.kl_coef > 0 and not adapters.rank and not given


class FrozenModel(ABC):
    """A rank's part of a model that is never trained, in the layout of the policy or of ranks of its own.

    Every method is called on every rank in the same order (collectives inside).
    """

    @abstractmethod
    def logprobs(self, batch: Batch) -> torch.Tensor:
        """Return the batch's log-probabilities under this model, as `Backend.logprobs` does."""

    @abstractmethod
    def tensors(self) -> Sequence[torch.Tensor]:
        """Return everything that it has on the device."""


class Backend(ABC):
    """A model under training. Every method is called on every rank in the same order (collectives inside)."""

    architecture: str
    """Name in the model's config.json, for the manifest."""
    lora: LoraConfig = NO_ADAPTERS
    """With a rank above 0, only adapters are trained."""
    targets: Sequence[AdapterTarget] = ()
    """The weights that have an adapter."""
    replicas: Replicas = ((0,),)

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
    def train_step(self, batch: Batch) -> StepStats:
        """Make one optimizer update; `batch` is the part of it that this rank's replica works on.

        `batch.totals` are the update's. There may be several in a step.
        """

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

    @abstractmethod
    def copy_state(self) -> HostState:
        """Return this rank's part of a checkpoint (parameters, optimizer, RNG), copied to host memory.

        The model may change then; the copies are valid until the next call.
        """

    def save(self, directory: Path) -> None:
        """Write this rank's part of a checkpoint into an existing directory; returns when it is there."""
        self.copy_state().write(directory)

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """Load what this rank has of the checkpoint of any layout that the backend can have, bit for bit.

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

        Their shapes are as `matches_layout` says.
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

    @abstractmethod
    def close(self) -> None:
        """Release the model and leave the process groups; idempotent."""
