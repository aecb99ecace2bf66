"""Sets what Linux's prctl(2) decides for a process; on other systems the calls have no effect.

PR_SET_PDEATHSIG ends a process when its parent ends, however the parent ends; strictly, when the *thread*
that started the process ends. PR_SET_CHILD_SUBREAPER makes orphans children of this process.
PR_SET_DUMPABLE, which child processes do not inherit, so that each hides itself after its exec, closes
/proc/PID/environ, mem, fd and cwd to processes without the capability CAP_SYS_PTRACE: ptrace(2) is refused,
and no core is dumped.
"""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
_prctl = getattr(ctypes.CDLL(None), "prctl", lambda *arguments: None)


def die_with_parent(signum: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent ends."""
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
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def keep_private() -> None:
    """Have this process write files that other users cannot read, and hide its memory and variables."""
    os.umask(0o077)
    _prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def open_to_own_user() -> None:
    """Let processes of the same user open this process's descriptors by /proc, and read its memory again."""
    _prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
