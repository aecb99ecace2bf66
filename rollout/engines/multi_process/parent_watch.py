"""Ends engine processes when their owner ends; until then both hold the device lock."""

import os
import select
import threading
import time
from collections.abc import Callable

from protocol.host.fd_passing import receive_fd

OWNER = "_TETHER_ENGINE_OWNER"
"""Environment variable with the pid of the engine's owner."""


def exit_with_parent(end: Callable[[int], None]) -> bool:
    """Call `end(owner's pid)` in a thread after the process that owns this engine has ended.

    Call this before any device allocation: from then on this process shares the owner's device lock, if any.

    Returns: False immediately if this process belongs to no engine.

    Raises:
        OSError: the owner is alive, but does not reply.
    """
    owner = os.environ.get(OWNER, "")
    if not owner.isdecimal() or int(owner) == os.getpid():
        return False

    def watch() -> None:
        _wait_for_exit(int(owner))
        end(int(owner))

    threading.Thread(target=watch, name="tether-owner", daemon=True).start()
    receive_fd(int(owner))
    return True


def _wait_for_exit(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # no pidfd in some sandboxes: poll every second
        while _exists(pid):
            time.sleep(1)
        return
    select.select([handle], [], [])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
