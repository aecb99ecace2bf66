"""Ends engine processes when the engine's owner ends; until then they hold its device lock with it."""

import os
import select
import threading
import time
from collections.abc import Callable

from protocol.host.fd_passing import receive_fd

OWNER = "_TETHER_ENGINE_OWNER"
"""Environment variable: pid of the process that owns the engine."""


def exit_with_parent(end: Callable[[int], None]) -> bool:
    """Call `end(pid of the owner)` in a thread when the process that owns this engine has ended.

    Call it before any allocation on a device: from then on this process holds the lock of the device, if
    there is one, together with its owner.

    Returns: False at once if this process belongs to no engine.

    Raises:
        OSError: the owner lives, but does not answer.
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
    except OSError:  # no pidfd here (a sandbox): poll every second
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
