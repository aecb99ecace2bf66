"""Divides the time between two step reports into what the trainer did, so that the parts add up."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Part = Literal["wait", "train", "publish", "checkpoint"]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds between two reports; names and meanings are those of `StepReport`. The others are `step_s`."""

    step_s: float
    wait_s: float
    train_s: float
    publish_s: float
    checkpoint_s: float
    other_s: float


class StepClock:
    """Measures what the step path does, one part after the other; what no part names is the rest."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start now; `now` returns seconds."""
        self._now = now
        self._last = now()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: Part) -> Iterator[None]:
        """Count the block as a part; blocks must not overlap."""
        began = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - began

    def lap(self) -> StepTimes:
        """Return the times since the last lap, or since the start, and begin the next one."""
        now = self._now()
        step_s, self._last = now - self._last, now
        seconds, self._seconds = self._seconds, {}
        return StepTimes(
            step_s=step_s,
            wait_s=seconds.get("wait", 0.0),
            train_s=seconds.get("train", 0.0),
            publish_s=seconds.get("publish", 0.0),
            checkpoint_s=seconds.get("checkpoint", 0.0),
            other_s=step_s - sum(seconds.values()),
        )
