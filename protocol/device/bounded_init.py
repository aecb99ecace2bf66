"""Process groups are made in a thread of their own: NCCL's initialisation may wait for the other end without
a bound.

A thread that is not done in time is left behind: it touches nothing but what it makes, and gives that up
should it ever come back. A process bears a few of them; then it has to be started again.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from protocol.errors import PoisonedError

T = TypeVar("T")

MAX_STUCK = 4
GRACE_S = 5.0
"""For a thread that was left behind to come back, as gloo does at its own deadline, before it counts as
stuck."""
POLL_S = 0.02
"""Between two looks whether the other end has gone."""

_lock = threading.Lock()
_left: dict[threading.Thread, float] = {}
"""Left behind, and when."""


def init_with_deadline(
    make: Callable[[Callable[[T], None]], T],
    discard: Callable[[T], None],
    seconds: float,
    gone: Callable[[], bool],
) -> T:
    """What `make` returns or raises, in a thread.

    Args:
        make: may never return, and shares nothing with others. What it has to show already, although it
            goes on with it, it hands over.
        discard: gives up what `make` returned or handed over when nobody wants it any more; called from
            either thread, also twice.
        seconds: to wait for it.
        gone: whether there is nobody any more to make it with.

    Raises:
        TimeoutError: it has not returned in time.
        ConnectionError: the other end has gone.
        PoisonedError: too many threads are stuck; none was started.
    """
    check_stuck()
    held: list[T] = []
    made: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make(held.append))
        except BaseException as error:
            failed.append(error)
        with _lock:
            late = _left.pop(threading.current_thread(), None) is not None
            ended.set()
        if late:
            for group in held or made:
                discard(group)

    ended = threading.Event()
    thread = threading.Thread(target=run, name="weights.group", daemon=True)
    thread.start()
    end = time.monotonic() + seconds
    try:
        while not ended.wait(POLL_S):
            if gone():
                raise ConnectionError("the other end left while the group was made")
            if time.monotonic() > end:
                raise TimeoutError("the group was not made in time")
    except BaseException:
        with _lock:
            left = not ended.is_set()
            if left:
                _left[thread] = time.monotonic()
        for group in held if left else made:  # what the thread waits for in there ends, on a device too
            discard(group)
        raise
    if failed:
        raise failed[0]
    return made[0]


def check_stuck() -> None:
    """Raises PoisonedError if so many threads are stuck that this process should not go on."""
    now = time.monotonic()
    with _lock:
        stuck = sum(now - since > GRACE_S for since in _left.values())
    if stuck >= MAX_STUCK:
        raise PoisonedError(
            f"{stuck} threads are stuck where process groups are made: this process has to be started again"
        )
