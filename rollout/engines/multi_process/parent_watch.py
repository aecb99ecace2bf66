"""Engine processes end with the process whose engine they are, however that ends, and hold until then what it
gives them to hold."""

import os
import select
import threading
import time
from collections.abc import Callable

from protocol.host.fd_passing import receive_fd

OWNER = "TETHER_ENGINE_OWNER"
"""Environment: pid of the process whose engine this is."""


def exit_with_parent(end: Callable[[int], None]) -> bool:
    """If this process belongs to another one, watch that in a thread and call `end(its pid)` when it has
    ended.

    To be called before anything is allocated on a device: the lock of the device, if there is one, is held
    from then on.

    Returns: whether it does.

    Raises:
        OSError: the owner lives, but does not answer.
    """
    owner = os.environ.get(OWNER, "")
    if not owner.isdecimal() or int(owner) == os.getpid():
        return False

    def watch() -> None:
        _await_end(int(owner))
        end(int(owner))

    threading.Thread(target=watch, name="tether-owner", daemon=True).start()
    receive_fd(int(owner))
    return True


def _await_end(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # no pidfd here (a sandbox): look every second
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
