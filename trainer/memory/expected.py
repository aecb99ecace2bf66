"""Describes a rank's device memory at the peak of a step, and chooses a micro-batch for it. No torch here."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig

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
    def parallel(self) -> ParallelConfig:
        """Section `[parallel]`."""

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


TOKENS_STEP = 1024
"""A chosen budget is a multiple of it."""
TOKENS_MOST = 32768
FIRST_TOKENS = {"cpu": 8192, "cuda": 16384}
"""Tokens of a micro-batch by the kind of device, where neither a setting nor a plan says them."""
USED_SHARE = 0.9
"""Share of the free memory that the expected peak may take: the rest is for fragments and errors of it."""


def largest_budget(work: Planned, room: float) -> int:
    """Return the largest budget whose expected peak fits; 0 if none does."""
    budgets = range(TOKENS_MOST, 0, -TOKENS_STEP)
    return next((tokens for tokens in budgets if work.expected(tokens).peak <= room), 0)


def refusal(work: Planned, room: float) -> str:
    """Return one sentence: the smallest budget's memory, the free memory, and settings that would fit."""
    least = work.expected(TOKENS_STEP)
    return (
        f"the trainer does not fit on its device: a step of {TOKENS_STEP} tokens a micro-batch is expected "
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
    """Yield settings that fit, the cheapest first, each with its largest budget and what that takes."""
    for settings, changed in work.alternatives():
        if tokens := largest_budget(changed, room):
            yield settings, tokens, changed.expected(tokens)
