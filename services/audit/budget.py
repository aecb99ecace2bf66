"""Limits the resources of an audit: one thread, and a share of its time."""

import threading
import time
from collections.abc import Callable

import torch


def compute_alone() -> None:
    """Make torch use one thread in the calling thread only; other threads keep their setting.

    Waiting torch threads spin: on two busy cores a pass of few tokens took thirty times as much processor
    time with two threads as with one.
    """
    others = torch.get_num_threads()
    torch.set_num_threads(1)  # for this thread and for threads that start later
    restorer = threading.Thread(target=torch.set_num_threads, args=(others,))
    restorer.start()
    restorer.join()


class Budget:
    """Processor time of an audit: at most a share of the time since its start, hence 0 at the start."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with no time.

        Args:
            share: share of one processor's time.
            clock: returns seconds.
        """
        self._share, self._clock, self._began = share, clock, clock()
        self.thread_s = 0.0
        """Processor time of the audit's thread, seconds."""
        self.charged_s = 0.0
        """Time spent in other threads and processes, seconds."""

    @property
    def spent_s(self) -> float:
        """Total time spent, seconds."""
        return self.thread_s + self.charged_s

    def note_thread(self) -> None:
        """Record the processor time of the calling thread, which belongs to the audit."""
        self.thread_s = time.thread_time()

    def charge(self, seconds: float) -> None:
        """Add time spent elsewhere for the audit."""
        self.charged_s += seconds

    def covers(self, seconds: float = 0.0) -> bool:
        """Return whether the budget covers additional work of `seconds`."""
        return self.spent_s + seconds <= self._share * (self._clock() - self._began)
