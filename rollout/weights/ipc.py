"""Copies versions out of the trainer's GPU memory by CUDA IPC handle, on the same host: `location` is
"HOST:PORT".

    receiver -> sender   {"version": v, "epoch": e, "layout": d}
    sender -> receiver   {"gpu": UUID, "buckets": [{"memory": n, "handle": [...]}, ...]}  a handle where `n` is new on this connection
    receiver -> sender   {"done": v}                                                      the memory may be written again

Large tensors are copied straight to their place. Other memory of the GPU that the engine uses is read where
it lies; that of another GPU, which need not be visible to this process, comes over the link by the copy
engines, some pieces ahead of those that are looked at.
"""

import base64
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.buckets import ALONE_ON_GPU_BYTES, Chunk, chunks
from rollout.weights.base import Destination
from rollout.weights.connected_receiver import ConnectedReceiver
from rollout.weights.sender_connection import parse_address
from rollout.weights.verification import AHEAD, Deadline, destination_of


class IpcReceiver(ConnectedReceiver):
    """Keeps the mappings for the next version."""

    def __init__(self) -> None:
        super().__init__()
        self._mapped: dict[int, torch.Tensor] = {}

    def _address(self, manifest: WeightManifest) -> tuple[str, int]:
        if not torch.cuda.is_available():
            raise WeightError(
                f"version {manifest.version}: transport ipc hands over GPU memory, and this engine has no GPU; use shm"
            )
        return parse_address(manifest.location, manifest.location)

    def _pieces(
        self, answer: dict[str, Any], manifest: WeightManifest, deadline: Deadline, place: Destination
    ) -> Iterator[tuple[Chunk, torch.Tensor]]:
        mapped = [self._map(found) for found in answer["buckets"]]
        if len(mapped) != len(manifest.buckets):
            raise WeightError(
                f"version {manifest.version}: {len(mapped)} buckets, the manifest has {len(manifest.buckets)}"
            )
        here = answer["gpu"] == str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        yield from (_in_place if here else _over_the_link)(manifest, mapped, place)

    def _drain_device(self) -> None:
        # Hanging up frees the trainer's memory to be written again, and the next version comes to the same
        # places.
        with suppress(RuntimeError):
            torch.cuda.synchronize()

    def _interrupt(self) -> None:
        """Nobody waits: what is being copied is mapped, and whether it was the version is looked at
        afterwards."""

    def _release(self) -> None:
        self._mapped = {}

    def _map(self, found: dict[str, Any]) -> torch.Tensor:
        """The memory of a bucket in this process, [bytes] uint8."""
        number = int(found["memory"])
        if number not in self._mapped:
            _, *parts = found["handle"]
            handle, nbytes, offset, counter, counter_offset, event, _ = (
                base64.b64decode(part) if isinstance(part, str) else part for part in parts
            )
            # Mapped under our own GPU, whichever it is on; what was published is complete, so there is no
            # event to wait for.
            storage = torch.UntypedStorage._new_shared_cuda(
                torch.cuda.current_device(), handle, nbytes, offset, counter, counter_offset, event, False
            )
            self._mapped[number] = torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
        return self._mapped[number]


def _in_place(
    manifest: WeightManifest, mapped: list[torch.Tensor], place: Destination
) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Pieces of memory of our own GPU: those that have a place are copied to it, the others are read where
    they lie."""
    for piece in chunks(manifest, ALONE_ON_GPU_BYTES):
        source = mapped[piece.bucket][piece.start : piece.end]
        target = destination_of(piece, source.device, place)
        yield piece, source if target is None else target.copy_(source)


def _over_the_link(
    manifest: WeightManifest, mapped: list[torch.Tensor], place: Destination
) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Pieces of another GPU's memory, copied to their place or into memory of our own, some ahead."""
    looking, copying = torch.cuda.current_stream(), torch.cuda.Stream()
    coming: deque[tuple[Chunk, torch.Tensor, torch.cuda.Event]] = deque()

    def arrived() -> tuple[Chunk, torch.Tensor]:
        piece, memory, event = coming.popleft()
        looking.wait_event(event)
        return piece, memory

    for piece in chunks(manifest, ALONE_ON_GPU_BYTES):
        source = mapped[piece.bucket][piece.start : piece.end]
        target = destination_of(piece, source.device, place)
        memory = torch.empty_like(source) if target is None else target
        copying.wait_stream(looking)  # memory that is used again may still be looked at
        with torch.cuda.stream(copying):
            memory.copy_(source, non_blocking=True)
            coming.append((piece, memory, copying.record_event()))
        if len(coming) == AHEAD:
            yield arrived()
    while coming:
        yield arrived()
