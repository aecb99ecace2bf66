"""Calls Linux's prctl(2) for this process; on other systems the functions have no effect.

- PR_SET_PDEATHSIG sends a signal when the parent ends, strictly: when the *thread* that started the process
  ends.
- PR_SET_CHILD_SUBREAPER makes orphaned descendants children of this process.
- Clearing PR_SET_DUMPABLE protects /proc/PID/environ, mem, fd and cwd from processes without the capability
  CAP_SYS_PTRACE, refuses ptrace(2) and disables core dumps. Child processes do not inherit the setting, so
  each child must clear the flag after its exec.
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
    """Ask the kernel to send this process a signal when its parent ends."""
    _prctl(PR_SET_PDEATHSIG, signum)


def tied_to_this_process(signum: int = signal.SIGTERM) -> Callable[[], None]:
    """Return a `preexec_fn` with which a child process gets a signal when this process ends."""
    parent = os.getpid()

    def before_exec() -> None:
        die_with_parent(signum)
        if os.getppid() != parent:  # the parent died before the signal was set up
            os._exit(1)

    return before_exec


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Make descendants whose parents end within the block children of this process."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def keep_private() -> None:
    """Make new files of this process unreadable for other users, and protect its memory and environment."""
    os.umask(0o077)
    _prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def open_to_own_user() -> None:
    """Allow processes of the same user to open this process's descriptors in /proc and read its memory."""
    _prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
