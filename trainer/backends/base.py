"""The interface of a training backend: megatron (`trainer/megatron`), reference (plain torch, the oracle) and
scripted (dry runs)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, AdapterTarget, LoraConfig
from trainer.batch import Batch


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one optimizer step measured, reduced over all ranks; equal on every rank."""

    loss: float
    grad_norm: float
    entropy: float
    clip_fraction: float
    ratio_mean: float
    logprob_error_max: float
    """Largest |recomputed - behaviour| log-probability over trained tokens of lag 0; 0 if there are none."""
    trained_tokens: int
    skipped: str = ""


class Backend(ABC):
    """A model under training. Every method is called on every rank in the same order (collectives inside)."""

    architecture: str
    """Name in the model's config.json, for the manifest."""
    lora: LoraConfig = NO_ADAPTERS
    """With a rank, only adapters are trained."""
    targets: Sequence[AdapterTarget] = ()
    """The weights that have an adapter."""

    @abstractmethod
    def train_step(self, batch: Batch) -> StepStats:
        """One optimizer step on the whole batch (every rank gets the same batch and works on its share)."""

    @abstractmethod
    def logprobs(self, batch: Batch) -> torch.Tensor:
        """float32 [N, L]: log-probabilities of the batch's tokens under the current weights, at the batch's
        temperature; 0 where not sampled. Complete on every rank."""

    @abstractmethod
    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """The same under the model that training began with (a copy is kept from the first call to
        `keep_reference`)."""

    @abstractmethod
    def keep_reference(self) -> None:
        """Keep a copy of the current weights as the reference model. Called before the first step if
        `kl_coef` > 0."""

    @abstractmethod
    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is trained, as full tensors in a fixed order: the model's under their Hugging Face names, or A
        and B of its adapters under PEFT's. Yields on rank 0 only, but must be exhausted on every rank."""

    def export_model(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same of the whole model, adapters merged into it."""
        return self.export()

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write this rank's part of a checkpoint (parameters, optimizer, RNG) into an existing directory.

        Returns when every rank has written its part, so that whoever called it on rank 0 may declare the
        checkpoint complete.
        """

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """The inverse of `save`, bit for bit.

        Raises:
            SettingsError: if the checkpoint is of another layout or model; names both.
        """

    @abstractmethod
    def offload(self) -> int:
        """Move everything that training holds on the device to the host. Until `onload` nothing but `close`
        may follow.

        Returns: the bytes.

        Raises:
            SettingsError: an engine reads its masters; nothing changed.
        """

    @abstractmethod
    def onload(self) -> None:
        """The inverse, bit for bit. Nothing happens if nothing was moved.

        Raises:
            TetherError: if the device has no room for it; nothing changed.
        """

    def masters(self) -> Mapping[str, torch.Tensor]:
        """fp32, dense, what the optimizer steps. Transport `shared` brings them to memory that the engine
        reads, so whoever owns them looks at them anew (`.data`) at each use.

        Raises:
            SettingsError: this backend computes with weights of its own alone.
        """
        raise SettingsError(
            f"setting weights.transport: {type(self).__name__} does not share weights with an engine (trainer.backend)"
        )

    def master_parts(self) -> Mapping[str, torch.Tensor]:
        """The parts of the masters, where they are now, that are the tensors of `export`, in its order, laid
        as `is_laid_as` says."""
        return self.masters()

    def attach(self, parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
        """Compute with an engine's live weights from now on, and never write to them: a step leaves that to
        the engine.

        Args:
            parameters: by the names that this model has for its own; their bytes are those that the
                masters make.
            buffers: what the engine computes with beside them.

        Raises:
            SettingsError: the engine's tensors are not what this model computes with; names the tensor.
            WeightError: they are of other weights; names the tensor. Either way nothing changed.
        """
        raise SettingsError(
            f"setting weights.transport: {type(self).__name__} does not share weights with an engine (trainer.backend)"
        )

    @abstractmethod
    def close(self) -> None: ...
