"""Implements a backend without a model, for dry runs: a step sleeps, and everything else is real."""

import time
from collections.abc import Iterator
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from protocol.errors import SettingsError
from trainer.backends.base import Backend, StepStats
from trainer.batch import Batch, trained_tokens
from trainer.config import TrainerConfig
from trainer.storage.host_state import HostState

PART = "rank_00000.safetensors"
"""File in a checkpoint."""
TENSOR = "scripted.weight"
MODULUS = 1 << 20


class ScriptedBackend(Backend):
    """Backend with one tensor that depends on every trained batch, so its digest identifies the batches."""

    architecture = "scripted"

    def __init__(self, *, trainer: TrainerConfig) -> None:
        self._step_s = trainer.step_s
        self._weight = torch.zeros(16, dtype=torch.int64)

    def train_step(self, batch: Batch) -> StepStats:
        time.sleep(self._step_s)
        tokens = trained_tokens(batch)
        trained = len(tokens.place)
        position = batch.step % len(self._weight)
        self._weight[position] = (
            self._weight[position] * 31 + int(batch.tokens.sum()) + trained + 1
        ) % MODULUS
        return StepStats(
            trained_tokens=trained,
            loss=float((tokens.weights * tokens.advantages).sum()) if trained else None,
        )

    def logprobs(self, batch: Batch) -> torch.Tensor:
        return torch.zeros(batch.tokens.shape)

    def reference_logprobs(self, batch: Batch) -> torch.Tensor:
        return torch.zeros(batch.tokens.shape)

    def keep_reference(self) -> None:
        """Return at once: there are no weights."""

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield TENSOR, self._weight.float()

    def copy_state(self) -> HostState:
        return HostState({PART: {TENSOR: self._weight.clone()}})

    def restore(self, directory: Path) -> None:
        try:
            self._weight = safetensors.torch.load_file(directory / PART)[TENSOR]
        except (OSError, SafetensorError, KeyError) as error:
            raise SettingsError(
                f"checkpoint {directory}: not one of the scripted backend: {error}"
            ) from error

    def offload(self) -> int:
        return 0

    def onload(self) -> None:
        """Return at once: no tensor was moved."""

    def close(self) -> None:
        """Return at once: there are no resources."""
