"""The interface of a training backend: megatron (`trainer/megatron`), reference (plain torch, the oracle) and scripted (dry runs)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.batch import Batch


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Section `[parallel]`. Names as in Megatron-core."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    data_parallel_size: int = 1
    sequence_parallel: bool = False
    use_distributed_optimizer: bool = True

    @property
    def world_size(self) -> int:
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.data_parallel_size


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """Section `[optimizer]`. AdamW on fp32 masters. Names as in Megatron-core."""

    lr: float = 1e-5
    lr_warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Section `[trainer]`."""

    backend: str = "megatron"
    """megatron, reference or scripted."""
    dtype: str = "float32"
    """Of parameters in forward and backward: float32 or bfloat16 (with fp32 masters)."""
    device: str = "auto"
    """auto, cpu or cuda."""
    micro_batch_size: int = 16
    """Samples in one forward pass."""
    threads: int = 1
    """CPU threads of each rank."""
    checkpoint_every: int = 20
    """Steps between checkpoints; the last step always makes one."""
    keep_checkpoints: int = 2
    recompute_logprobs: bool = False
    """Compute the proximal log-probabilities with the trainer before each step (decoupled objective)."""
    seed: int = 0
    step_s: float = 0.0
    """scripted only: seconds that a step sleeps."""


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

    @abstractmethod
    def train_step(self, batch: Batch) -> StepStats:
        """One optimizer step on the whole batch (every rank gets the same batch and works on its share)."""

    @abstractmethod
    def logprobs(self, batch: Batch) -> torch.Tensor:
        """float32 [N, L]: log-probabilities of the batch's tokens under the current weights, at the batch's temperature; 0 where not
        sampled. Complete on every rank."""

    @abstractmethod
    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        """The same under the model that training began with (a copy is kept from the first call to `keep_reference`)."""

    @abstractmethod
    def keep_reference(self) -> None:
        """Keep a copy of the current weights as the reference model. Called before the first step if `kl_coef` > 0."""

    @abstractmethod
    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors under their Hugging Face names, in a fixed order; yields on rank 0 only, but must be exhausted on every rank."""

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write this rank's part of a checkpoint (parameters, optimizer, RNG) into an existing directory.

        Returns when every rank has written its part, so that whoever called it on rank 0 may declare the checkpoint complete.
        """

    @abstractmethod
    def restore(self, directory: Path) -> None:
        """The inverse of `save`, bit for bit.

        Raises:
            SettingsError: if the checkpoint is of another layout or model; names both.
        """

    @abstractmethod
    def close(self) -> None: ...
