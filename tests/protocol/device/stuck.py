"""Initializations that block for as long as a test wants."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from protocol.device import bounded_init
from protocol.device.bounded_init import init_with_deadline


class Library:
    """Makes groups, when it comes to it."""

    def __init__(self) -> None:
        self.may_return = threading.Event()
        self.discarded: list[str] = []

    def make(self, hold: Callable[[str], None]) -> str:
        self.may_return.wait()
        return "group"

    def give_up(self, *, hung_up: bool = False) -> None:
        with pytest.raises(ConnectionError if hung_up else TimeoutError):
            init_with_deadline(self.make, self.discarded.append, 600 if hung_up else 0, lambda: hung_up)


@contextmanager
def stuck(library: Library, count: int, more: int = 0) -> Iterator[None]:
    """So many threads are left behind, and at the end they and as many more as the block has added return."""
    until_none_is_left()  # of what tests before have given up
    for number in range(count):
        library.give_up(hung_up=number % 2 == 0)
    try:
        yield
    finally:
        library.may_return.set()
        until_none_is_left()
        assert len(library.discarded) == count + more


def until_none_is_left() -> None:
    """All threads that were left behind have come back."""
    end = time.monotonic() + 180  # gloo comes back at its own deadline, which is a minute in other tests
    while bounded_init._abandoned or any(thread.name == "weights.group" for thread in threading.enumerate()):
        assert time.monotonic() < end
        time.sleep(0.001)
