"""Creates the process group of a weight transfer, with two ranks: the sender and one receiver.

The ranks meet over the existing connection between them, whose ends are authenticated. torch's own stores
serve any client that connects. This store lives in the memory of both ends: an entry that one end sets goes
to the other end as a line of the connection.

    both   {"key": k, "value": hexadecimal}   an entry that this end has set
    both   {"joined": true}                   this end has its group, and sets no more entries
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from protocol.device.bounded_init import POLL_S, init_with_deadline
from protocol.host.child_environment import with_variables
from protocol.weights.buckets import ALONE_BYTES, ALONE_ON_GPU_BYTES

BACKENDS = ("gloo", "nccl")
"""Backends of a pair group: gloo on CPUs, nccl on GPUs."""
SENDER, RECEIVER = 0, 1
"""Ranks."""
ALONE_BYTES_OF_BACKEND = {"gloo": ALONE_BYTES, "nccl": ALONE_ON_GPU_BYTES}
"""Backend -> `alone_bytes` of `protocol.weights.slices.BucketSizes`."""
NO_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # an error of the group does not end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does a watchdog thread that is delayed
}
"""Environment variables for creating a group without a watchdog."""

_lock = threading.Lock()


def make_pair(
    store: Any, rank: int, device: torch.device, seconds: float, created: Callable[[Any], None]
) -> Any:
    """Return a gloo or NCCL group of two connected ranks; rank 0 has broadcast a byte.

    On a GPU the call blocks forever if the peer hangs, so callers use `init_with_deadline`.

    Args:
        store: store by which the ranks find each other.
        rank: `SENDER` or `RECEIVER`.
        device: the CPU, for gloo, or a GPU, for NCCL.
        seconds: timeout of gloo operations.
        created: called with the group before any operation can block on it.
    """
    group: Any
    if device.type == "cpu":
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=seconds))
        created(group)
        group.broadcast([torch.zeros(1, dtype=torch.uint8)]).wait()
        return group
    torch.cuda.set_device(device)
    with _lock, with_variables(NO_WATCHDOG):  # callers bound every wait; other groups keep their watchdog
        group = dist.ProcessGroupNCCL(store, rank, 2, dist.ProcessGroupNCCL.Options())
    created(group)
    stream = torch.cuda.Stream(device)  # separate from the training stream
    with torch.cuda.stream(stream):  # NCCL creates the communicator in the first collective
        group.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)]).wait()
        stream.synchronize()
    return group


def abort(group: Any) -> None:
    """Abort a group, which ends collectives that block in it."""
    with suppress(RuntimeError, AttributeError):
        group.abort()


MAX_ENTRIES = 256
"""Maximum entries of the other end; a group of two sets a few."""


class JsonConnection(Protocol):
    """Connection that carries JSON objects."""

    def send(self, message: dict[str, Any]) -> None:
        """Send a JSON object. Raises OSError, ValueError or WeightError."""

    def receive(self) -> dict[str, Any] | None:
        """Return the next JSON object that has begun to arrive; None: none has begun to arrive.

        Raises:
            OSError, ValueError, WeightError: either end has disconnected, or the other end sent something
                else.
        """


def join_pair(line: JsonConnection, rank: int, device: torch.device, seconds: float) -> Any:
    """Return the group of `make_pair` with the process at the other end of `line`.

    Args:
        line: connection that must not be used elsewhere during the call.

    Raises:
        TimeoutError, PoisonedError: as `init_with_deadline`.
        OSError, ValueError, WeightError: as `JsonConnection`.
    """
    end = time.monotonic() + seconds
    store = _PairStore()
    exchange = _Exchange(line, store)

    def disconnected() -> bool:
        exchange.step()
        return False  # a lost connection raises

    make = partial(make_pair, store, rank, device, seconds)
    group = None
    try:
        group = init_with_deadline(make, abort, seconds, disconnected)
        exchange.step()
        line.send({"joined": True})
        while not exchange.joined:
            exchange.step()
            if time.monotonic() > end:
                raise TimeoutError("the other end has not joined the process group in time")
            time.sleep(POLL_S)
    except BaseException:
        store.fail()
        if group is not None:
            abort(group)
        raise
    weakref.finalize(group, store.fail)  # torch keeps the store alive, but not the exchange that serves it
    return group


class _PairStore(Store):
    """Store of a group of two ranks.

    The thread that creates the group waits for entries; another thread adds them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unsent: deque[tuple[str, bytes]] = deque()
        """Entries that this end has set and not yet sent to the other end."""
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._failed = False

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self.add_entry(key, value)
        self.unsent.append((key, bytes(value)))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._entries for key in keys)

    def wait(self, keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        """Wait until the other end has set these keys; raise ConnectionError after `fail`."""
        with self._changed:
            self._changed.wait_for(lambda: self._failed or self.check(keys))
        if not self.check(keys):
            raise ConnectionError("the process group was given up")

    def add_entry(self, key: str, value: bytes) -> None:
        """Add an entry that either end has set."""
        with self._changed:
            self._entries[key] = bytes(value)
            self._changed.notify_all()

    def fail(self) -> None:
        """Make the waiting thread raise ConnectionError."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


class _Exchange:
    """Exchange of store entries between both ends."""

    def __init__(self, line: JsonConnection, store: _PairStore) -> None:
        self.joined = False
        """Whether the other end has its group."""
        self._line = line
        self._store = store
        self._received_entries = 0

    def step(self) -> None:
        """Send the entries that this end has set, and receive entries of the other end."""
        while self._store.unsent:
            key, value = self._store.unsent.popleft()
            self._line.send({"key": key, "value": value.hex()})
        while not self.joined and (message := self._line.receive()) is not None:
            if message == {"joined": True}:
                self.joined = True
            else:
                self._add_received(message)

    def _add_received(self, message: dict[str, Any]) -> None:
        key, value = message.get("key"), message.get("value")
        self._received_entries += 1
        if not isinstance(key, str) or not isinstance(value, str) or self._received_entries > MAX_ENTRIES:
            raise ValueError("the other end of a process group sent no entry of its store")
        self._store.add_entry(key, bytes.fromhex(value))
