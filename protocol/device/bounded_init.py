"""Initializes process groups with a deadline, because NCCL's initialization may block forever.

The initialization runs in a thread. A thread that misses its deadline is abandoned: it shares no state, and
discards its result if it ever returns. A process tolerates fewer than `MAX_STUCK` such threads and must then
be restarted.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from protocol.errors import PoisonedError

T = TypeVar("T")

MAX_STUCK = 4
"""Number of stuck threads from which no further initialization is started."""
GRACE_S = 5.0
"""Time after which an abandoned thread counts as stuck, seconds. Threads of gloo return at their own
deadline."""
POLL_S = 0.005
"""Interval for checking the connection to the peer, seconds."""

_lock = threading.Lock()
_abandoned: dict[threading.Thread, float] = {}
"""Thread -> time.monotonic() at which it was abandoned."""


def init_with_deadline(
    make: Callable[[Callable[[T], None]], T],
    discard: Callable[[T], None],
    seconds: float,
    disconnected: Callable[[], bool],
) -> T:
    """Run `make` in a thread, and return its result or raise its exception.

    Args:
        make: may block forever, and must not share state. It passes each object that it creates to its
            argument; the object can then be discarded while `make` still blocks.
        discard: aborts an unused object that `make` created or returned; called from either thread, possibly
            twice.
        disconnected: returns whether the peer has left.

    Raises:
        TimeoutError: `make` has not returned within `seconds`.
        ConnectionError: the peer has left.
        PoisonedError: too many threads are stuck; no thread was started.
    """
    check_stuck()
    attempt = _Attempt(make, discard)
    end = time.monotonic() + seconds
    try:
        while not attempt.ended.wait(POLL_S):
            if disconnected():
                raise ConnectionError("the peer disconnected while the process group was initialized")
            if time.monotonic() > end:
                raise TimeoutError("the process group was not initialized in time")
    except BaseException:
        attempt.abandon()
        raise
    return attempt.result()


def check_stuck() -> None:
    """Raise PoisonedError if so many threads are stuck that this process must be restarted."""
    now = time.monotonic()
    with _lock:
        stuck = sum(now - since > GRACE_S for since in _abandoned.values())
    if stuck >= MAX_STUCK:
        raise PoisonedError(
            f"{stuck} threads are stuck initializing process groups: this process must be restarted"
        )


class _Attempt(Generic[T]):
    """One call of `make` in a thread, which may be abandoned."""

    def __init__(self, make: Callable[[Callable[[T], None]], T], discard: Callable[[T], None]) -> None:
        self.ended = threading.Event()
        self._make = make
        self._discard = discard
        self._created: list[T] = []
        self._returned: list[T] = []
        self._raised: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="weights.group", daemon=True)
        self._thread.start()

    def result(self) -> T:
        """Return the result of the ended call, or raise its exception and discard its objects."""
        if self._raised:
            for group in self._created:
                self._discard(group)
            raise self._raised.pop()  # a reference here would keep everything in its traceback alive
        return self._returned[0]

    def abandon(self) -> None:
        """Discard the result of an ended call, or the objects of a running call, which unblocks the call."""
        with _lock:
            running = not self.ended.is_set()
            if running:
                _abandoned[self._thread] = time.monotonic()
        for group in self._created if running else self._returned:
            self._discard(group)

    def _run(self) -> None:
        try:
            self._returned.append(self._make(self._created.append))
        except BaseException as error:
            self._raised.append(error)
        with _lock:
            late = _abandoned.pop(threading.current_thread(), None) is not None
            self.ended.set()
        if late:
            for group in self._created or self._returned:
                self._discard(group)
