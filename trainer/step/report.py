"""Times the parts of a step, and puts its measurements into a report."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import msgspec

from protocol.messages import StepReport
from trainer.backends.base import StepStats
from trainer.step.plan import StepPlan

PARTS = ("wait", "train", "publish", "checkpoint")
"""Parts of a step that are timed; other time is `other_s`."""
Part = Literal["wait", "train", "publish", "checkpoint", "drafts"]


class StepClock:
    """Timer for the consecutive parts of a step; time outside all parts counts as other time."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start the timer; `now` returns seconds."""
        self._now = now
        self._last = now()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Time the block as a part. Blocks must not overlap, except "drafts" within "wait"."""
        began = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - began

    def lap(self) -> dict[str, float]:
        """Return the seconds since the last lap or the start, and begin the next lap.

        The keys are fields of `StepReport`: `step_s`, one for each part, and `drafts_s` if that part
        occurred.
        """
        now = self._now()
        step_s, self._last = now - self._last, now
        seconds, self._seconds = self._seconds, {}
        drafts = {"drafts_s": seconds.pop("drafts")} if "drafts" in seconds else {}
        parts = {f"{part}_s": seconds.get(part, 0.0) for part in PARTS}
        return {"step_s": step_s, **parts, "other_s": step_s - sum(seconds.values()), **drafts}


def measured_report(
    plan: StepPlan, stats: StepStats, *, epoch: str, groups: int, times: Mapping[str, float]
) -> StepReport:
    """Return the report of a step with the measurements of its plan, its updates and the clock.

    Args:
        plan: plan of the step.
        stats: measurements of its updates.
        epoch: epoch of the trainer that committed the step.
        groups: number of groups in the batch.
        times: result of `StepClock.lap`.
    """
    tokens = plan.stats.step_tokens
    return msgspec.structs.replace(
        plan.stats,
        epoch=epoch,
        groups=groups,
        tokens_per_s=tokens / times["step_s"] if times["step_s"] > 0 else None,
        train_tokens_per_s=tokens / times["train_s"] if times["train_s"] > 0 else None,
        time=time.time(),
        batch_digest=plan.digest,
        **stats.measured(),
        **times,
    )
