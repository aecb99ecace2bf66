"""Copies versions out of the trainer's GPU memory by CUDA IPC handle, on the same host: `location` is "HOST:PORT".

    receiver -> sender   {"version": v, "epoch": e}
    sender -> receiver   {"gpu": UUID, "buckets": [{"memory": n, "handle": [...]}, ...]}  a handle where `n` is new on this connection
    receiver -> sender   {"done": v}                                                      the memory may be written again

Large tensors are copied straight to their place. Other memory of the GPU that the engine uses is read where it lies; that of another GPU,
which need not be visible to this process, comes over the link by the copy engines, some pieces ahead of those that are looked at.
"""

import base64
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from protocol.buckets import Piece, pieces
from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from rollout.weights.base import Place, nowhere
from rollout.weights.entries import AHEAD, Deadline, Verification, target_of, view
from rollout.weights.line import Line, parse_address


class IpcReceiver:
    """Keeps the mappings for the next version. Used by one thread at a time; `close` may come from another."""

    def __init__(self) -> None:
        self._location = ""
        self._line: Line | None = None
        self._mapped: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        """`close` was called since the last `tensors` began."""

    def tensors(self, manifest: WeightManifest, deadline_s: float, place: Place = nowhere) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        if not torch.cuda.is_available():
            raise WeightError(f"version {manifest.version}: transport ipc hands over GPU memory, and this engine has no GPU; use shm")
        self._ended.clear()
        deadline = Deadline(manifest, deadline_s)
        complete = False
        try:
            line, answer = self._ask(manifest, deadline)
            mapped = [self._map(found) for found in answer["buckets"]]
            if len(mapped) != len(manifest.buckets):
                raise WeightError(f"version {manifest.version}: {len(mapped)} buckets, the manifest has {len(manifest.buckets)}")
            here = answer["gpu"] == str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
            check = Verification(manifest)
            for piece, memory in (_in_place if here else _over_the_link)(manifest, mapped, place):
                for entry in piece.entries:
                    tensor = view(entry, memory, piece.start)
                    check.add(entry, tensor)
                    yield entry, tensor
            check.finish(deadline, line.hung_up)
            line.done(manifest, deadline)
            complete = True
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise WeightError(f"version {manifest.version} from {manifest.location}: {error}") from error
        finally:
            if not complete:
                # Hanging up frees the trainer's memory to be written again, and the next version comes to the same places.
                with suppress(RuntimeError):
                    torch.cuda.synchronize()
                self.close()

    def close(self) -> None:
        """Hang up and unmap; wakes a thread that waits for an answer."""
        self._ended.set()
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            line, self._line = self._line, None
            self._mapped = {}
        if line is not None:
            line.close()

    def _ask(self, manifest: WeightManifest, deadline: Deadline) -> tuple[Line, dict[str, Any]]:
        """Ask for a version, on the connection that there is; on a new one if the sender has closed it in the meantime."""
        if self._line is not None and self._location == manifest.location:
            with suppress(OSError, ValueError):
                return self._line, self._line.ask(manifest, deadline)
        if self._ended.is_set():
            raise ConnectionError("the receiver was closed")
        self._drop()
        self._location = manifest.location
        self._line = line = Line(*parse_address(manifest.location, manifest.location), deadline)
        return line, line.ask(manifest, deadline)

    def _map(self, found: dict[str, Any]) -> torch.Tensor:
        """The memory of a bucket in this process, [bytes] uint8."""
        number = int(found["memory"])
        if number not in self._mapped:
            _, *parts = found["handle"]
            handle, nbytes, offset, counter, counter_offset, event, _ = (
                base64.b64decode(part) if isinstance(part, str) else part for part in parts
            )
            # Mapped under our own GPU, whichever it is on; what was published is complete, so there is no event to wait for.
            storage = torch.UntypedStorage._new_shared_cuda(
                torch.cuda.current_device(), handle, nbytes, offset, counter, counter_offset, event, False
            )
            self._mapped[number] = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
        return self._mapped[number]


def _in_place(manifest: WeightManifest, mapped: list[torch.Tensor], place: Place) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Pieces of memory of our own GPU: those that have a place are copied to it, the others are read where they lie."""
    for piece in pieces(manifest):
        source = mapped[piece.bucket][piece.start : piece.end]
        target = target_of(piece, source.device, place)
        yield piece, source if target is None else target.copy_(source)


def _over_the_link(manifest: WeightManifest, mapped: list[torch.Tensor], place: Place) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Pieces of another GPU's memory, copied to their place or into memory of our own, some ahead."""
    looking, copying = torch.cuda.current_stream(), torch.cuda.Stream()
    coming: deque[tuple[Piece, torch.Tensor, torch.cuda.Event]] = deque()

    def arrived() -> tuple[Piece, torch.Tensor]:
        piece, memory, event = coming.popleft()
        looking.wait_event(event)
        return piece, memory

    for piece in pieces(manifest):
        source = mapped[piece.bucket][piece.start : piece.end]
        target = target_of(piece, source.device, place)
        memory = torch.empty_like(source) if target is None else target
        copying.wait_stream(looking)  # memory that is used again may still be looked at
        with torch.cuda.stream(copying):
            memory.copy_(source, non_blocking=True)
            coming.append((piece, memory, copying.record_event()))
        if len(coming) == AHEAD:
            yield arrived()
    while coming:
        yield arrived()
