"""Describes the memory of a rank's device at the peak of a step. No torch here."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from trainer.config import OptimizerConfig, TrainerConfig

GIB = 1 << 30
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LIBRARIES = 64 << 20
"""Workspaces that cuBLAS takes from torch's allocator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedMemory:
    """Bytes on the device of one rank, by what they are for."""

    parameters: int
    """Bytes of all models' parameters, trained or not."""
    gradients: int
    optimizer: int
    """Masters and moments."""
    activations: int
    """What forward passes keep."""
    head: int
    """Logits and their gradient."""
    workspace: int
    """Bytes that the backward pass of a layer takes for a moment."""
    update: int
    """Bytes that the optimizer takes for a moment, after the passes."""
    visiting: int = 0
    """Parameters of the largest model that is on the device only before the passes."""

    @property
    def peak(self) -> int:
        """The largest sum at one moment of a step."""
        passes = self.activations + max(self.head, self.workspace)
        most = max(passes, self.update, self.visiting)
        return self.parameters + self.gradients + self.optimizer + LIBRARIES + most

    def __str__(self) -> str:
        kinds = ("parameters", "gradients", "optimizer", "activations", "head", "workspace")
        parts = ", ".join(f"{kind} {getattr(self, kind) / GIB:.2f}" for kind in kinds)
        return f"{self.peak / GIB:.1f} GiB ({parts})"


class Planned(Protocol):
    """A run whose memory a backend computes from its settings."""

    @property
    def trainer(self) -> TrainerConfig:
        """Section `[trainer]`."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """Section `[optimizer]`."""

    def expected(self, tokens: int) -> ExpectedMemory:
        """Return the memory of a step with micro-batches of so many tokens, on the fullest rank."""

    def alternatives(self) -> "Iterator[tuple[str, Planned]]":
        """Yield settings that take less memory and the run with them, the cheapest first."""
