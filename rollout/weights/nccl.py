"""Receives versions through a process group of two ranks with the sender.

`location` is "HOST:PORT/BACKEND". The dialogue:

    receiver -> sender   {"version": v, "epoch": e, "layout": d}
    sender -> receiver   {"join": true}      first request: both create a group, rank 0 the sender, which is
    receiver -> sender   {"joining": true}   kept for the next versions; they find each other by the lines of
                                             `protocol/device/pair_store.py`
                         {"ready": true}     later requests
    both                 a byte, broadcast by rank 0 in a new group, which completes a GPU's communicator
    both                 the chunks of the buckets (`protocol.weights.buckets.chunks`), broadcast by rank 0
    receiver -> sender   {"done": v}

The group is aborted on any error. With a group per receiver, an engine that hangs or dies delays no other, no
group has to be rebuilt when a member leaves, and the collectives need no order with those of the engine.
Large tensors are received straight at their destination, a few chunks ahead of the one that is read. On a GPU
all of it is queued on the current stream, and the host waits once, at the end, with a deadline. An aborted
collective may return with partial buffers, so only digests prove that a tensor is complete.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from protocol.device.pair_group import ALONE, BACKENDS, RECEIVER, abort
from protocol.device.pair_store import Line, join_pair
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.buckets import Chunk, chunks
from rollout.weights.base import Destination
from rollout.weights.connected_receiver import ConnectedReceiver
from rollout.weights.sender_connection import parse_address
from rollout.weights.verification import AHEAD, Deadline, destination_of

T = TypeVar("T")


class NcclReceiver(ConnectedReceiver):
    """Keeps its group with the sender for the next version."""

    def __init__(self) -> None:
        super().__init__(PairChannel())


class PairChannel:
    """Receives chunks as rank 1 of a group of two."""

    def __init__(self) -> None:
        self.group: Any = None

    def address(self, manifest: WeightManifest) -> tuple[str, int]:
        host, port, _ = parse_location(manifest.location)
        return host, port

    def chunks(
        self,
        answer: dict[str, Any],
        manifest: WeightManifest,
        deadline: Deadline,
        place: Destination,
        disconnected: Callable[[], bool],
        line: Line,
    ) -> Iterator[tuple[Chunk, torch.Tensor]]:
        device = self.join(answer, manifest, deadline, line)
        _, _, backend = parse_location(manifest.location)

        def memories() -> Iterator[tuple[Chunk, torch.Tensor]]:
            for chunk in chunks(manifest, ALONE[backend]):
                memory = destination_of(chunk, device, place)
                if memory is None:
                    memory = torch.empty(chunk.end - chunk.start, dtype=torch.uint8, device=device)
                yield chunk, memory

        yield from self.received(memories(), deadline, disconnected)

    def join(
        self, answer: dict[str, Any], manifest: WeightManifest, deadline: Deadline, line: Line
    ) -> torch.device:
        """Create the group if the sender's answer says so; return where it receives."""
        _, _, backend = parse_location(manifest.location)
        device = (
            torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        )
        if "join" in answer:
            line.send({"joining": True})
            self.group = join_pair(line, RECEIVER, device, deadline.remaining("joining the group"))
        return device

    def received(
        self,
        memories: Iterable[tuple[T, torch.Tensor]],
        deadline: Deadline,
        disconnected: Callable[[], bool],
    ) -> Iterator[tuple[T, torch.Tensor]]:
        """Yield each memory, uint8, when it has its bytes; a few broadcasts are in flight at a time."""
        queued: deque[tuple[T, torch.Tensor, Any]] = deque()
        for what, memory in memories:
            queued.append((what, memory, self._broadcast(memory, deadline, disconnected)))
            if len(queued) == AHEAD:
                yield _received(*queued.popleft())
        while queued:
            yield _received(*queued.popleft())

    def drain_device(self) -> None:
        """Do nothing: aborting the group waits."""

    def interrupt(self) -> None:
        """Abort the group, which ends NCCL's collectives at once.

        Gloo has no abort: its collectives end when the connection to the sender does, or at their deadline.
        """
        if self.group is not None:
            abort(self.group)

    def release(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            abort(group)

    def _broadcast(self, memory: torch.Tensor, deadline: Deadline, disconnected: Callable[[], bool]) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=deadline.remaining("receiving"))
        group = self.group
        if group is None or disconnected():  # an aborted group would create another communicator
            raise RuntimeError("the connection was closed")
        return group.broadcast([memory], options)


def parse_location(location: str) -> tuple[str, int, str]:
    """Split "HOST:PORT/BACKEND".

    Raises:
        WeightError: it is not of that form, or the backend is unknown.
    """
    address, _, backend = location.partition("/")
    if backend not in BACKENDS:
        raise WeightError(
            f"location {location!r} is not HOST:PORT/BACKEND with a backend of {', '.join(BACKENDS)}"
        )
    return *parse_address(address, location), backend


def _received(what: T, memory: torch.Tensor, work: Any) -> tuple[T, torch.Tensor]:
    work.wait()  # nccl: the stream waits, not the host
    return what, memory
