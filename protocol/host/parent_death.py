"""A process that ends with the one that started it, also when that one is killed (Linux parent-death signal;
elsewhere nothing happens)."""

import ctypes
import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """Ask the kernel to send this process a signal when the thread that started it ends."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signum)


def tied_to_this_process() -> Callable[[], None]:
    """What a child of this process runs before exec (`preexec_fn`): it gets SIGTERM when the thread that
    started it ends."""
    parent = os.getpid()

    def before_exec() -> None:
        die_with_parent()
        if os.getppid() != parent:  # the parent died before the request
            os._exit(1)

    return before_exec
