"""Copies versions out of the trainer's GPU memory by CUDA IPC handles, on the same host.

`location` is "HOST:PORT". The dialogue:

    receiver -> sender   {"version": v, "epoch": e, "layout": d}
    sender -> receiver   {"gpu": UUID, "buckets": [{"memory": n, "handle": [...]}, ...]}
                             a handle where `n` is new on this connection
    receiver -> sender   {"done": v}
                             the memory may be written again

Large tensors are copied straight to their destination. Other memory is read in place if it is on the engine's
own GPU. Memory of another GPU, which need not be visible to this process, is copied by the copy engines, a
few chunks ahead of the one that is read.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from protocol.device.bucket_handles import open_bucket
from protocol.device.pair_store import Line
from protocol.device.shared_tensors import gpu_of
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.buckets import ALONE_ON_GPU_BYTES, Chunk, chunks
from rollout.weights.base import Destination
from rollout.weights.connected_receiver import ConnectedReceiver
from rollout.weights.sender_connection import parse_address
from rollout.weights.verification import AHEAD, Deadline, destination_of


class IpcReceiver(ConnectedReceiver):
    """Keeps the trainer's memory mapped for the next version."""

    def __init__(self) -> None:
        super().__init__(IpcChannel())


class IpcChannel:
    """Maps the trainer's buckets."""

    def __init__(self) -> None:
        self._mapped: dict[int, torch.Tensor] = {}
        """Number on the wire -> bucket."""

    def address(self, manifest: WeightManifest) -> tuple[str, int]:
        if not torch.cuda.is_available():
            raise WeightError(
                f"version {manifest.version}: transport ipc shares GPU memory, and this engine has no GPU; "
                "use shm"
            )
        return parse_address(manifest.location, manifest.location)

    def chunks(
        self,
        answer: dict[str, Any],
        manifest: WeightManifest,
        deadline: Deadline,
        place: Destination,
        disconnected: Callable[[], bool],
        line: Line,
    ) -> Iterator[tuple[Chunk, torch.Tensor]]:
        mapped = self.mapped(answer, manifest.buckets, manifest)
        gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
        yield from (_in_place if answer["gpu"] == gpu else _from_peer)(manifest, mapped, place)

    def drain_device(self) -> None:
        # After a disconnect the trainer may write its memory again, and the next version has the same
        # destinations.
        if torch.cuda.is_available():
            with suppress(RuntimeError):
                torch.cuda.synchronize()

    def interrupt(self) -> None:
        """Do nothing: no thread waits for the sender; what is being copied is mapped, and verified later."""

    def release(self) -> None:
        self._mapped = {}

    def mapped(
        self, answer: dict[str, Any], sizes: Sequence[int], manifest: WeightManifest
    ) -> list[torch.Tensor]:
        """Return the buckets of a sender's answer in this process, uint8.

        Args:
            answer: the sender's answer.
            sizes: bytes of each bucket.
            manifest: the version.

        Raises:
            WeightError: there are fewer or more buckets, or one is smaller.
        """
        version, described = manifest.version, answer["buckets"]
        if len(described) != len(sizes):
            raise WeightError(f"version {version}: {len(described)} buckets, the manifest has {len(sizes)}")
        found = [self._bucket(answer["gpu"], bucket) for bucket in described]
        for number, (bucket, size) in enumerate(zip(found, sizes, strict=True)):
            if len(bucket) < size:
                raise WeightError(f"version {version}: bucket {number} has {len(bucket)} bytes of {size}")
        return found

    def _bucket(self, place: str, described: dict[str, Any]) -> torch.Tensor:
        number = int(described["memory"])
        if number not in self._mapped:
            self._mapped[number] = open_bucket(place, described["handle"])
        return self._mapped[number]


def _in_place(
    manifest: WeightManifest, mapped: list[torch.Tensor], place: Destination
) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Yield chunks on our own GPU: copied to their destination if they have one, in place otherwise."""
    for chunk in chunks(manifest, ALONE_ON_GPU_BYTES):
        source = mapped[chunk.bucket][chunk.start : chunk.end]
        target = destination_of(chunk, source.device, place)
        yield chunk, source if target is None else target.copy_(source)


def _from_peer(
    manifest: WeightManifest, mapped: list[torch.Tensor], place: Destination
) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Yield chunks of another GPU, copied to their destination or to memory of ours, a few chunks ahead."""
    reading, copying = torch.cuda.current_stream(), torch.cuda.Stream()
    queued: deque[tuple[Chunk, torch.Tensor, torch.cuda.Event]] = deque()

    def first() -> tuple[Chunk, torch.Tensor]:
        chunk, memory, event = queued.popleft()
        reading.wait_event(event)
        return chunk, memory

    for chunk in chunks(manifest, ALONE_ON_GPU_BYTES):
        source = mapped[chunk.bucket][chunk.start : chunk.end]
        target = destination_of(chunk, source.device, place)
        memory = torch.empty_like(source) if target is None else target
        copying.wait_stream(reading)  # reused memory may still be read
        with torch.cuda.stream(copying):
            memory.copy_(source, non_blocking=True)
            queued.append((chunk, memory, copying.record_event()))
        if len(queued) == AHEAD:
            yield first()
    while queued:
        yield first()
