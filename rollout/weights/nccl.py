"""Receives versions through a process group of two with the sender: `location` is "HOST:PORT/BACKEND".

    receiver -> sender   {"version": v, "epoch": e, "layout": d}
    sender -> receiver   {"store_port": p}, then both make a TCPStore(HOST, p) and a group of rank 0 (sender) and rank 1; or {"ready": true}
    both                 a byte, broadcast by rank 0 when the group is new: only then a GPU's is complete
    both                 the pieces of the buckets (`protocol.weights.buckets.chunks`), broadcast by rank 0 in order
    receiver -> sender   {"done": v}

The group stays for the next version, and is aborted when anything goes wrong. Pairwise groups: an engine that
hangs or dies cannot hold up the others, a member that leaves needs no rebuild, and no order with the engine's
own collectives is needed. Large tensors come straight to their place; some pieces come while the ones before
are looked at. On a GPU all of it is queued on the current stream, and the host waits once, at the end, with a
deadline. An aborted collective may return with partial buffers, so only digests count.
"""

from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from protocol.device.bounded_init import init_with_deadline
from protocol.device.pair_group import ALONE, RECEIVER, abort, make_pair
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.buckets import Chunk, chunks
from rollout.weights.base import Destination
from rollout.weights.connected_receiver import ConnectedReceiver
from rollout.weights.sender_connection import parse_address
from rollout.weights.verification import AHEAD, Deadline, destination_of

BACKENDS = ("gloo", "nccl")


class NcclReceiver(ConnectedReceiver):
    """Rank 1 of a group of two."""

    def __init__(self) -> None:
        super().__init__()
        self._group: Any = None

    def _address(self, manifest: WeightManifest) -> tuple[str, int]:
        host, port, _ = parse_location(manifest.location)
        return host, port

    def _drain_device(self) -> None:
        """Aborting the group does that."""

    def _release(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            abort(group)

    def _interrupt(self) -> None:
        """NCCL's collectives end at once. Gloo knows no abort: its end when the connection to the sender
        does, or at their deadline."""
        if self._group is not None:
            abort(self._group)

    def _pieces(
        self, answer: dict[str, Any], manifest: WeightManifest, deadline: Deadline, place: Destination
    ) -> Iterator[tuple[Chunk, torch.Tensor]]:
        host, _, backend = parse_location(manifest.location)
        device = (
            torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        )
        if "store_port" in answer:
            seconds = deadline.remaining("joining the group")
            join = partial(_join, host, int(answer["store_port"]), device, seconds)
            self._group = init_with_deadline(join, abort, seconds, self._is_disconnected)
            if self._is_disconnected():  # before the group was there to be aborted
                raise ConnectionError("the connection was closed")
        coming: deque[tuple[Chunk, torch.Tensor, Any]] = deque()
        for piece in chunks(manifest, ALONE[backend]):
            target = destination_of(piece, device, place)
            memory = (
                torch.empty(piece.end - piece.start, dtype=torch.uint8, device=device)
                if target is None
                else target
            )
            coming.append((piece, memory, self._begin(memory, deadline)))
            if len(coming) == AHEAD:
                yield self._arrived(*coming.popleft())
        while coming:
            yield self._arrived(*coming.popleft())

    def _begin(self, memory: torch.Tensor, deadline: Deadline) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=deadline.remaining("receiving"))
        group = self._group
        if (
            group is None or self._is_disconnected()
        ):  # on one that was aborted another communicator would be made
            raise RuntimeError("the connection was closed")
        return group.broadcast([memory], options)

    def _arrived(self, piece: Chunk, memory: torch.Tensor, work: Any) -> tuple[Chunk, torch.Tensor]:
        work.wait()  # nccl: the stream waits, not the host
        return piece, memory


def parse_location(location: str) -> tuple[str, int, str]:
    """Split "HOST:PORT/BACKEND".

    Raises:
        WeightError: if it is not of that form or the backend is not known.
    """
    address, _, backend = location.partition("/")
    if backend not in BACKENDS:
        raise WeightError(
            f"location {location!r} is not HOST:PORT/BACKEND with a backend of {', '.join(BACKENDS)}"
        )
    return *parse_address(address, location), backend


def _join(host: str, port: int, device: torch.device, seconds: float, hold: Callable[[Any], None]) -> Any:
    """Blocks, for ever if the sender stands still."""
    store = TCPStore(host, port, 2, False, timedelta(seconds=seconds))
    store.set("receiver", "here")
    return make_pair(store, RECEIVER, device, seconds, hold)
