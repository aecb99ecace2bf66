"""Receives versions through a process group of two with the sender: `location` is "HOST:PORT/BACKEND".

    receiver -> sender   {"version": v, "epoch": e}
    sender -> receiver   {"store_port": p}, then both make a TCPStore(HOST, p) and a group of rank 0 (sender) and rank 1; or {"ready": true}
    both                 the pieces of the buckets (`protocol.buckets.pieces`), broadcast by rank 0 in order
    receiver -> sender   {"done": v}

The group stays for the next version, and is aborted when anything goes wrong. Pairwise groups: an engine that hangs or dies cannot hold
up the others, a member that leaves needs no rebuild, and no order with the engine's own collectives is needed. Large tensors come straight
to their place; some pieces come while the ones before are looked at. On a GPU all of it is queued on the current stream, and the host waits
once, at the end, with a deadline. An aborted collective may return with partial buffers, so only digests count.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from protocol.buckets import Piece, pieces
from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.nccl_environment import unwatched
from rollout.weights.base import Place, nowhere
from rollout.weights.entries import AHEAD, Deadline, Verification, target_of, view
from rollout.weights.line import Line, parse_address

BACKENDS = ("gloo", "nccl")


class NcclReceiver:
    """Rank 1 of a group of two. Used by one thread at a time; `close` may come from another."""

    def __init__(self) -> None:
        self._location = ""
        self._line: Line | None = None
        self._group: Any = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        """`close` was called since the last `tensors` began."""

    def tensors(self, manifest: WeightManifest, deadline_s: float, place: Place = nowhere) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        self._ended.clear()
        deadline = Deadline(manifest, deadline_s)
        host, port, backend = parse_location(manifest.location)
        complete = False
        # What is stuck in a library or on the GPU is ended by aborting the communicator.
        watchdog = threading.Timer(deadline.remaining("starting"), self.close)
        watchdog.daemon = True
        watchdog.start()
        try:
            line, answer = self._ask(host, port, manifest, deadline)
            if "store_port" in answer:
                self._group = _join(host, int(answer["store_port"]), backend, deadline)
            check = Verification(manifest)
            for piece, memory in self._pieces(manifest, backend, deadline, place):
                for entry in piece.entries:
                    tensor = view(entry, memory, piece.start)
                    check.add(entry, tensor)
                    yield entry, tensor
            check.finish(deadline, line.hung_up)
            line.done(manifest, deadline)
            complete = True
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, OverflowError) as error:
            deadline.remaining("receiving")
            raise WeightError(f"version {manifest.version} from {manifest.location}: {error}") from error
        finally:
            watchdog.cancel()
            if not complete:
                self.close()

    def close(self) -> None:
        """Hang up and abort the group; wakes a thread that waits for an answer or in a collective."""
        self._ended.set()
        self._drop()

    def _drop(self) -> None:
        with self._lock:  # also while it is aborted: when anybody's `close` has returned, nothing is written any more
            group, self._group = self._group, None
            line, self._line = self._line, None
            if group is not None:
                with suppress(RuntimeError, AttributeError):
                    group.abort()
            if line is not None:
                line.close()

    def _ask(self, host: str, port: int, manifest: WeightManifest, deadline: Deadline) -> tuple[Line, dict[str, Any]]:
        """Ask for a version, on the connection that there is; on a new one if the sender has closed it in the meantime."""
        if self._line is not None and self._location == manifest.location:
            with suppress(OSError, ValueError):
                return self._line, self._line.ask(manifest, deadline)
        if self._ended.is_set():
            raise ConnectionError("the receiver was closed")
        self._drop()
        self._location = manifest.location
        self._line = line = Line(host, port, deadline)
        return line, line.ask(manifest, deadline)

    def _pieces(self, manifest: WeightManifest, backend: str, deadline: Deadline, place: Place) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Every piece with its bytes, uint8."""
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        coming: deque[tuple[Piece, torch.Tensor, Any]] = deque()
        for piece in pieces(manifest):
            target = target_of(piece, device, place)
            memory = torch.empty(piece.end - piece.start, dtype=torch.uint8, device=device) if target is None else target
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
        if group is None:
            raise RuntimeError("the receiver was closed")
        return group.broadcast([memory], options)

    def _arrived(self, piece: Piece, memory: torch.Tensor, work: Any) -> tuple[Piece, torch.Tensor]:
        work.wait()  # nccl: the stream waits, not the host
        return piece, memory


def parse_location(location: str) -> tuple[str, int, str]:
    """Split "HOST:PORT/BACKEND".

    Raises:
        WeightError: if it is not of that form or the backend is not known.
    """
    address, _, backend = location.partition("/")
    if backend not in BACKENDS:
        raise WeightError(f"location {location!r} is not HOST:PORT/BACKEND with a backend of {', '.join(BACKENDS)}")
    return *parse_address(address, location), backend


def _join(host: str, port: int, backend: str, deadline: Deadline) -> Any:
    timeout = timedelta(seconds=deadline.remaining("joining the group"))
    store = TCPStore(host, port, 2, False, timeout)
    store.set("receiver", "here")
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, 1, 2, timeout)
    with unwatched():
        return dist.ProcessGroupNCCL(store, 1, 2, dist.ProcessGroupNCCL.Options())
