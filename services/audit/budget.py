"""Bounds what an audit takes of a run: one thread, and a share of its time."""

import threading
import time
from collections.abc import Callable

import torch


def compute_alone() -> None:
    """Have torch compute with the calling thread alone; in all other threads, also later ones, as before.

    Threads of torch that wait for each other spin. A pass of few tokens so took thirty times as much
    processor time with two threads on two busy cores as with one.
    """
    others = torch.get_num_threads()
    torch.set_num_threads(1)  # for this thread, and for threads that begin later
    restorer = threading.Thread(target=torch.set_num_threads, args=(others,))
    restorer.start()
    restorer.join()


class Budget:
    """Processor time of an audit: at most a share of the time since it began, which is none at the start."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without any time.

        Args:
            share: of the time of one processor.
            clock: seconds.
        """
        self._share, self._clock, self._began = share, clock, clock()
        self.thread_s = 0.0
        """Processor time of the audit's thread."""
        self.charged_s = 0.0
        """Time that was taken elsewhere."""

    @property
    def spent_s(self) -> float:
        """Seconds that were taken."""
        return self.thread_s + self.charged_s

    def note_thread(self) -> None:
        """Note all processor time of the calling thread, which is the audit's own."""
        self.thread_s = time.thread_time()

    def charge(self, seconds: float) -> None:
        """Add time that was taken elsewhere for the audit."""
        self.charged_s += seconds

    def covers(self, seconds: float = 0.0) -> bool:
        """Return whether there is time for work of some seconds."""
        return self.spent_s + seconds <= self._share * (self._clock() - self._began)
