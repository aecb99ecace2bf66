"""Retries the passes of a step that ran out of memory, with half the tokens per micro-batch.

Each attempt starts with zero gradients, so the result equals a step with the smaller budget. Before gradients
are reduced, ranks exchange their outcomes: if one rank ran out of memory, the others discard their passes. If
ranks wait for each other within a pass, or torch keeps the state of an unfinished pass, no rank can leave the
pass. The process then exits with an error, and torchrun ends the others.
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
    """Outcome of a rank's passes. The maximum over all ranks counts."""

    DONE = 0
    REPEAT = 1
    SMALLEST = 2
    """The rank ran out of memory, and no pass has more than one sample."""


class _DroppedPasses(Exception):
    """Leaves the passes of a rank because another rank ran out of memory."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


class Budgeted(Protocol):
    """Runner of a model's passes with a token budget."""

    micro_batch_tokens: int

    def counts(self, batch: Batch) -> Sequence[tuple[int, int]]:
        """Return samples and tokens of each pass of this rank under the budget. Not a collective."""


class OomRetry:
    """Token budget of micro-batches, which shrinks on out-of-memory errors."""

    def __init__(
        self,
        device: torch.device,
        tokens: int,
        reset: Callable[[], None],
        *,
        replicas: int,
        can_abort: bool,
    ) -> None:
        """Start with a budget.

        Args:
            device: device of this rank.
            tokens: tokens per micro-batch.
            reset: zeroes the gradients and drops state that passes left behind.
            replicas: number of ranks whose gradients are reduced together.
            can_abort: whether this rank can leave its passes without blocking another rank.
        """
        self.tokens = tokens
        self._device, self._reset = device, reset
        self._replicas, self._can_abort = replicas, can_abort
        self._warnings: list[str] = []
        """Messages about passes since the last step."""
        self._must_exchange = False
        """Whether the ranks must still exchange outcomes in this attempt."""

    def exchange_outcomes_before(self, reduce_gradients: Callable[..., None]) -> Callable[..., None]:
        """Return a function that exchanges outcomes in every step, then calls `reduce_gradients`."""

        def exchange_and_reduce(*args: Any, **options: Any) -> None:
            if (
                self._must_exchange
                and (outcome := self._exchange_outcome(Outcome.DONE, self.tokens)) is not Outcome.DONE
            ):
                raise _DroppedPasses(outcome)
            reduce_gradients(*args, **options)

        return exchange_and_reduce

    def step(self, runner: Budgeted, batch: Batch, passes: Callable[[], T]) -> tuple[T, tuple[str, ...]]:
        """Run the passes of a step, which end with the gradient reduction over the replicas.

        Args:
            runner: runner of the passes; its budget is set here.
            batch: this replica's part of the batch.
            passes: runs the passes.

        Returns:
            Result of `passes`, and messages if these or other passes since the last step were retried.

        Raises:
            SettingsError: out of memory, and the passes cannot be retried with smaller micro-batches.
        """
        result = self._repeat(runner, batch, passes, together=self._replicas > 1)
        warnings, self._warnings = self._warnings, []
        return result, tuple(warnings)

    def run_without_gradients(self, runner: Budgeted, batch: Batch, passes: Callable[[], T]) -> T:
        """Run passes without gradients, where replicas do not wait for each other; otherwise like `step`."""
        return self._repeat(runner, batch, passes, together=False)

    def run_optional(self, passes: Callable[[], T]) -> T:
        """Run optional passes without gradients, without changing the budget.

        Raises:
            torch.OutOfMemoryError: the passes ran out of memory.
            SettingsError: the passes ran out of memory, and this rank cannot leave its passes.
        """
        try:
            return passes()
        except torch.OutOfMemoryError as error:
            cause = _cause(error)
        self._clear()  # after the except block, because the error's frames hold tensors
        if not self._can_abort:
            raise self._cannot_retry_error(cause)
        raise torch.OutOfMemoryError(cause)

    def _repeat(self, runner: Budgeted, batch: Batch, passes: Callable[[], T], *, together: bool) -> T:
        first, cause = self.tokens, ""
        while True:
            self._must_exchange = together and self._can_abort
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
            # after the except block, because the error's frames hold tensors
            before = self.tokens
            self._clear()
            outcome = found
            if outcome is None:
                outcome = self._halve_budget(cause, runner.counts(batch), together)
            if outcome is Outcome.SMALLEST:
                raise SettingsError(
                    f"the trainer ran out of memory with one sample per micro-batch ({cause}): {REMEDY}"
                )
            log.warning("memory.out tokens=%d next=%d cause=%s", before, self.tokens, cause)

    def _clear(self) -> None:
        self._reset()
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _halve_budget(self, cause: str, counts: Sequence[tuple[int, int]], together: bool) -> Outcome:
        """Halve the budget on the rank that ran out of memory."""
        if not self._can_abort or (together and not self._must_exchange):
            raise self._cannot_retry_error(cause)
        divisible = any(samples > 1 for samples, _ in counts)
        tokens = max(1, min(self.tokens, max(tokens for _, tokens in counts)) // 2)
        outcome = Outcome.REPEAT if divisible and tokens < self.tokens else Outcome.SMALLEST
        if together:
            return self._exchange_outcome(outcome, tokens)
        self.tokens = tokens
        return outcome

    def _cannot_retry_error(self, cause: str) -> SettingsError:
        return SettingsError(
            f"the trainer ran out of memory with {self.tokens} tokens per micro-batch ({cause}), and a "
            "rank cannot leave its passes here, so the step cannot be repeated: lower "
            f"trainer.micro_batch_tokens; or {REMEDY}"
        )

    def _exchange_outcome(self, outcome: Outcome, tokens: int) -> Outcome:
        """Return the worst outcome of all replicas, and adopt the smallest budget. A collective."""
        self._must_exchange = False
        state = torch.tensor([int(outcome), -tokens], device=self._device)
        dist.all_reduce(state, dist.ReduceOp.MAX)
        worst, smallest = state.tolist()
        self.tokens = -smallest
        return Outcome(worst)


def _cause(error: torch.OutOfMemoryError) -> str:
    return str(error).partition(". ")[0]


def _warning(first: int, tokens: int, cause: str) -> str:
    return (
        f"out of memory with {first} tokens per micro-batch ({cause}); the passes were repeated with "
        f"{tokens}, which stay in force: lower trainer.micro_batch_tokens or trainer.memory_fraction"
    )
