"""Describes a rank's peak device memory of a step, and chooses micro-batches that fit.

Does not import torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig

GIB = 1 << 30
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LIBRARIES = 64 << 20
"""Size of cuBLAS workspaces in torch's allocator, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedMemory:
    """Bytes on the device of one rank, by purpose."""

    parameters: int
    """Bytes of all models' parameters, trained or not."""
    gradients: int
    optimizer: int
    """Masters and moments."""
    activations: int
    """Activations that forward passes store."""
    head: int
    """Logits and their gradient."""
    workspace: int
    """Temporary memory of a layer's backward pass."""
    update: int
    """Temporary memory of the optimizer, after the passes."""
    largest_offloaded: int = 0
    """Parameters of the largest model that is on the device only before the passes."""

    @property
    def peak(self) -> int:
        """Largest sum at any time of a step."""
        passes = self.activations + max(self.head, self.workspace)
        most = max(passes, self.update, self.largest_offloaded)
        return self.parameters + self.gradients + self.optimizer + LIBRARIES + most

    def __str__(self) -> str:
        kinds = ("parameters", "gradients", "optimizer", "activations", "head", "workspace")
        parts = ", ".join(f"{kind} {getattr(self, kind) / GIB:.2f}" for kind in kinds)
        return f"{self.peak / GIB:.1f} GiB ({parts})"


class Planned(Protocol):
    """Run whose memory a backend computes from its settings."""

    @property
    def parallel(self) -> ParallelConfig:
        """Section `[parallel]`."""

    @property
    def trainer(self) -> TrainerConfig:
        """Section `[trainer]`."""

    @property
    def optimizer(self) -> OptimizerConfig:
        """Section `[optimizer]`."""

    def expected(self, tokens: int) -> ExpectedMemory:
        """Return the memory of a step with `tokens` per micro-batch, on the rank with the highest peak."""

    def alternatives(self) -> "Iterator[tuple[str, Planned]]":
        """Yield settings that need less memory, each with its run, cheapest first."""


TOKENS_STEP = 1024
"""Chosen budgets are multiples of this number of tokens."""
TOKENS_MOST = 32768
FIRST_TOKENS = {"cpu": 8192, "cuda": 16384}
"""Device type -> tokens per micro-batch without a setting or plan."""
USED_SHARE = 0.9
"""Share of the free memory for the expected peak; the rest is for fragmentation and estimation errors."""


def largest_budget(work: Planned, room: float) -> int:
    """Return the largest budget whose expected peak fits into `room` bytes; 0 if none fits."""
    budgets = range(TOKENS_MOST, 0, -TOKENS_STEP)
    return next((tokens for tokens in budgets if work.expected(tokens).peak <= room), 0)


def refusal(work: Planned, room: float) -> str:
    """Return one sentence with the smallest budget's memory, the free memory, and settings that would fit."""
    least = work.expected(TOKENS_STEP)
    return (
        f"the trainer does not fit on its device: a step of {TOKENS_STEP} tokens per micro-batch is expected "
        f"to take {least}, and {room / GIB:.1f} GiB may be used; {_remedy(work, room)}"
    )


def _remedy(work: Planned, room: float) -> str:
    fitting = list(alternatives(work, room))
    if not fitting:
        return (
            "no setting of one rank would fit: spread it over more GPUs ([parallel]), or train adapters "
            "(lora.rank)"
        )
    best = max(fitting, key=lambda entry: entry[1])
    named = [fitting[0]] if best == fitting[0] else [fitting[0], best]
    parts = (
        f"with {settings}, up to {tokens} tokens ({memory.peak / GIB:.1f} GiB)"
        for settings, tokens, memory in named
    )
    return f"it would fit {', or '.join(parts)}"


def alternatives(work: Planned, room: float) -> Iterator[tuple[str, int, ExpectedMemory]]:
    """Yield settings that fit, cheapest first, each with its largest budget and expected memory."""
    for settings, changed in work.alternatives():
        if tokens := largest_budget(changed, room):
            yield settings, tokens, changed.expected(tokens)
