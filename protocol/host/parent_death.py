"""Ends a process when its parent ends, however the parent ends; and makes processes children of this one.

By Linux's prctl(2), PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER; on other systems nothing happens. Strictly,
the signal comes when the *thread* that started the process ends.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent ends."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signum)


def tied_to_this_process(signum: int = signal.SIGTERM) -> Callable[[], None]:
    """Return a `preexec_fn` by which a child of this process gets a signal when this process ends."""
    parent = os.getpid()

    def before_exec() -> None:
        die_with_parent(signum)
        if os.getppid() != parent:  # the parent died before the signal was set up
            os._exit(1)

    return before_exec


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Have descendants whose parents end within the block become children of this process."""
    if _prctl is not None:
        _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        if _prctl is not None:
            _prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
