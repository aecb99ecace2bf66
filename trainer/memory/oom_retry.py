"""Repeats the passes of a step that ran out of memory, with half the tokens a micro-batch.

Gradients are zero at the beginning of each attempt, so the result equals a step that began with the smaller
budget. Ranks agree before gradients are added up: a rank that ran out of memory tells the others, which have
made their passes and drop them. Where ranks wait for each other within a pass, or torch keeps the state of
one that did not end, no rank can leave it: the process ends with an error, and torchrun ends the others.
"""

import gc
import logging
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from protocol.errors import SettingsError
from trainer.batch import Batch

log = logging.getLogger("tether.trainer")
T = TypeVar("T")
REMEDY = (
    'set trainer.recompute_granularity to "full" (megatron: or "selective"), turn optimizer.cpu_offload on, '
    "generate shorter samples, or spread the trainer over more GPUs ([parallel])"
)


class Outcome(IntEnum):
    """Outcome of a rank's passes; the largest of all ranks counts."""

    DONE = 0
    REPEAT = 1
    SMALLEST = 2
    """It ran out of memory, and no pass has more than one sample."""


class _DroppedPasses(Exception):
    """Leaves the passes of a rank because another one ran out of memory."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class Budgeted(Protocol):
    """Passes of a model, with a budget."""

    micro_batch_tokens: int

    def counts(self, batch: Batch) -> Sequence[tuple[int, int]]:
        """Return samples and tokens of each pass that this rank makes under the budget; no collective."""


class OomRetry:
    """The budget of tokens that is in force, and how it shrinks."""

    def __init__(
        self,
        device: torch.device,
        tokens: int,
        reset: Callable[[], None],
        *,
        replicas: int,
        is_whole: bool,
    ) -> None:
        """Begin with a budget.

        Args:
            device: of this rank.
            tokens: of a micro-batch.
            reset: zeroes the gradients and drops what passes left behind.
            replicas: ranks that add up their gradients.
            is_whole: whether this rank can leave its passes without another one waiting for it.
        """
        self.tokens = tokens
        self._device, self._reset = device, reset
        self._replicas, self._is_whole = replicas, is_whole
        self._warnings: list[str] = []
        """Sentences about passes since the last step."""
        self._agrees = False
        """Whether the ranks have yet to agree in this attempt."""

    def agreeing_before(self, add_up: Callable[..., None]) -> Callable[..., None]:
        """Return a function that adds up gradients of replicas, before which they agree in every step."""

        def agree_and_add_up(*args: Any, **options: Any) -> None:
            if self._agrees and (outcome := self._agreed(Outcome.DONE, self.tokens)) is not Outcome.DONE:
                raise _DroppedPasses(outcome)
            add_up(*args, **options)

        return agree_and_add_up

    def step(self, runner: Budgeted, batch: Batch, passes: Callable[[], T]) -> tuple[T, tuple[str, ...]]:
        """Make the passes of a step, which end by adding up gradients over the replicas.

        Args:
            runner: makes them with the budget that it is given here.
            batch: the part of this rank's replica.
            passes: makes them.

        Returns:
            What `passes` returned, and a sentence if they, or other passes since the last step, had to be
            repeated.

        Raises:
            SettingsError: out of memory, and the passes cannot be repeated with smaller micro-batches.
        """
        result = self._repeat(runner, batch, passes, together=self._replicas > 1)
        warnings, self._warnings = self._warnings, []
        return result, tuple(warnings)

    def alone(self, runner: Budgeted, batch: Batch, passes: Callable[[], T]) -> T:
        """Make passes without gradients, in which replicas do not wait for each other; else as `step`."""
        return self._repeat(runner, batch, passes, together=False)

    def once(self, passes: Callable[[], T]) -> T:
        """Make passes without gradients that can be left out, with a budget that stays as it is.

        Raises:
            torch.OutOfMemoryError: they ran out of memory.
            SettingsError: they did, and this rank cannot leave its passes.
        """
        try:
            return passes()
        except torch.OutOfMemoryError as error:
            cause = _cause(error)
        self._clear()  # here the error is gone, and with it all that its frames held
        if not self._is_whole:
            raise self._stuck(cause)
        raise torch.OutOfMemoryError(cause)

    def _repeat(self, runner: Budgeted, batch: Batch, passes: Callable[[], T], *, together: bool) -> T:
        first, cause = self.tokens, ""
        while True:
            self._agrees = together and self._is_whole
            runner.micro_batch_tokens = self.tokens
            found: Outcome | None = None
            try:
                result = passes()
            except torch.OutOfMemoryError as error:
                cause = _cause(error)
            except _DroppedPasses as dropped:
                cause, found = "another rank ran out of memory", dropped.outcome
            else:
                if cause:
                    self._warnings.append(_warning(first, self.tokens, cause))
                return result
            # here the error is gone, and with it all that its frames held
            before = self.tokens
            self._clear()
            outcome = found
            if outcome is None:
                outcome = self._shrunk(cause, runner.counts(batch), together)
            if outcome is Outcome.SMALLEST:
                raise SettingsError(
                    f"the trainer ran out of memory with one sample a micro-batch ({cause}): {REMEDY}"
                )
            log.warning("memory.out tokens=%d next=%d cause=%s", before, self.tokens, cause)

    def _clear(self) -> None:
        self._reset()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _shrunk(self, cause: str, counts: Sequence[tuple[int, int]], together: bool) -> Outcome:
        """Halve the budget on the rank that was short."""
        if not self._is_whole or (together and not self._agrees):
            raise self._stuck(cause)
        divisible = any(samples > 1 for samples, _ in counts)
        tokens = max(1, min(self.tokens, max(tokens for _, tokens in counts)) // 2)
        outcome = Outcome.REPEAT if divisible and tokens < self.tokens else Outcome.SMALLEST
        if together:
            return self._agreed(outcome, tokens)
        self.tokens = tokens
        return outcome

    def _stuck(self, cause: str) -> SettingsError:
        return SettingsError(
            f"the trainer ran out of memory with {self.tokens} tokens a micro-batch ({cause}), and a "
            "rank cannot leave its passes here, so the step cannot be repeated: lower "
            f"trainer.micro_batch_tokens; or {REMEDY}"
        )

    def _agreed(self, outcome: Outcome, tokens: int) -> Outcome:
        """Return the worst outcome of all replicas, and take over the smallest budget. A collective."""
        self._agrees = False
        state = torch.tensor([int(outcome), -tokens], device=self._device)
        dist.all_reduce(state, dist.ReduceOp.MAX)
        worst, smallest = state.tolist()
        self.tokens = -smallest
        return Outcome(worst)


def _cause(error: torch.OutOfMemoryError) -> str:
    return str(error).partition(". ")[0]


def _warning(first: int, tokens: int, cause: str) -> str:
    return (
        f"out of memory with {first} tokens a micro-batch ({cause}); the passes were repeated with {tokens}, "
        "which stay in force: lower trainer.micro_batch_tokens or trainer.memory_fraction"
    )
