"""Hides a process's files, memory and variables from other users, and from other processes of its user.

By umask(2), which child processes inherit, and on Linux by prctl(2), PR_SET_DUMPABLE, which they do not: each
process hides itself after its exec. Then /proc/PID/environ, mem, fd and cwd are closed to processes without
the capability CAP_SYS_PTRACE, ptrace(2) is refused, and no core is dumped.
"""

import ctypes
import os

PR_SET_DUMPABLE = 4
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def keep_private() -> None:
    """Have this process write files that other users cannot read, and hide its memory and variables."""
    os.umask(0o077)
    _set_dumpable(0)


def open_to_own_user() -> None:
    """Let processes of the same user open this process's descriptors by /proc, and read its memory again."""
    _set_dumpable(1)


def _set_dumpable(value: int) -> None:
    if _prctl is not None:
        _prctl(PR_SET_DUMPABLE, value, 0, 0, 0)
