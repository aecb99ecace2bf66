"""Transport `ipc`: reads slices in a trainer rank's memory; sender: `trainer/weights/served/ipc_handles.py`.

`location` is "HOST:PORT/cuda", or "HOST:PORT/cpu" where the trainer has no GPU and its pieces are in host
memory. Memory of the engine's own GPU, and host memory, is read in place. Of memory of another GPU, which
need not be visible to this process, the cuts are copied, those that are dense by the copy engines, a few
buckets ahead of the one that is read; a large cut straight to its destination.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from protocol.device.bucket_handles import HOST, machine, open_bucket
from protocol.device.cut_memory import cuts_in, pieces_in
from protocol.device.shared_tensors import gpu_of
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.boxes import relative
from protocol.weights.slices import BucketSizes, Cut, PiecePlace, Transfer, piece_places
from rollout.weights.channel import AHEAD, PartTransfer, memory_of
from rollout.weights.sender_connection import parse_location

VERSIONS = 2
"""Versions in the memory of a trainer rank; their buckets are used again."""
UNLIMITED = 1 << 62
"""Bytes."""
DEVICES = ("cpu", "cuda")
"""Devices on which a rank's pieces may be."""


class HandleSlices:
    """Maps the buckets of one trainer rank's pieces."""

    def __init__(self) -> None:
        self._mapped: dict[int, torch.Tensor] = {}
        """Number on the wire -> bucket."""
        self._plan: Transfer | None = None
        self._sizes: tuple[int, ...] = ()
        """Bytes of the rank's buckets, by the plan."""
        self._places: tuple[PiecePlace, ...] = ()
        """Where its pieces are in these."""
        self._sources: dict[tuple[int, ...], list[list[torch.Tensor]]] = {}
        """Numbers of mapped buckets -> the elements of each cut in these, by buckets of the plan."""

    def address(self, manifest: WeightManifest) -> tuple[str, int]:
        host, port, device = parse_location(manifest.location, DEVICES)
        if device == "cuda" and not torch.cuda.is_available():
            raise WeightError(
                f"version {manifest.version}: transport ipc shares GPU memory, and this engine has no GPU; "
                "use shm"
            )
        return host, port

    def sizes(self, answer: dict[str, Any]) -> BucketSizes:
        """Return no limits for memory of our own GPU: its cuts are read in place, without buckets."""
        return BucketSizes(UNLIMITED, UNLIMITED) if _is_ours(answer["gpu"]) else BucketSizes(*answer["sizes"])

    def slices(self, transfer: PartTransfer) -> Iterator[Iterable[tuple[Cut, torch.Tensor]]]:
        gpu, sources = transfer.answer["gpu"], self._sources_of(transfer)
        found = iter(sources) if gpu == HOST or _is_ours(gpu) else _copies_of_peer(transfer, sources)
        for bucket, tensors in zip(transfer.plan.buckets, found, strict=True):
            yield zip(bucket, tensors, strict=True)

    def sums(self, transfer: PartTransfer, count: int) -> torch.Tensor:
        transfer.line.send({"sums": count})
        return torch.frombuffer(bytearray(transfer.line.raw(8 * count)), dtype=torch.int64)

    def drain_device(self) -> None:
        # After a disconnect the trainer may write its memory again, and the next version has the same
        # destinations.
        if torch.cuda.is_available():
            with suppress(RuntimeError):
                torch.cuda.synchronize()

    def interrupt(self) -> None:
        """Return at once: no thread waits for the sender, and mapped bytes are verified after the copy."""

    def release(self) -> None:
        self._mapped, self._plan, self._sources = {}, None, {}

    def _sources_of(self, transfer: PartTransfer) -> list[list[torch.Tensor]]:
        """Return the elements of each cut of each bucket in the memory of its trainer rank."""
        manifest, answer, plan = transfer.manifest, transfer.answer, transfer.plan
        if plan is not self._plan:
            self._plan, self._sources = plan, {}
            self._sizes, self._places = piece_places(manifest, transfer.part, int(answer["sizes"][0]))
        mapped = self._buckets_of(answer, manifest)
        key = tuple(int(bucket["memory"]) for bucket in answer["buckets"])
        if key not in self._sources:
            if len(self._sources) == VERSIONS:
                self._sources = {}
            pieces = pieces_in(mapped, self._places, manifest, transfer.part)
            boxes = [piece.box for piece in manifest.parts[transfer.part].pieces]
            self._sources[key] = [
                [pieces[cut.piece][relative(cut.box, boxes[cut.piece])] for cut in bucket]
                for bucket in plan.buckets
            ]
        return self._sources[key]

    def _buckets_of(self, answer: dict[str, Any], manifest: WeightManifest) -> list[torch.Tensor]:
        """Return the buckets of a sender's answer in this process, uint8.

        Raises:
            WeightError: they are on another host, there are fewer or more buckets, or one is smaller.
        """
        version, described, sizes = manifest.version, answer["buckets"], self._sizes
        (boot, name), (own_boot, own_name) = answer["machine"], machine()
        if boot != own_boot:
            raise WeightError(
                f"version {version}: transport ipc shares the memory of host {name}, and this engine is on "
                f"{own_name}; use nccl"
            )
        if len(described) != len(sizes):
            raise WeightError(f"version {version}: {len(described)} buckets, the plan has {len(sizes)}")
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


def _is_ours(gpu: str) -> bool:
    """Return whether memory there is on this process's GPU."""
    return gpu != HOST and gpu == gpu_of(torch.device("cuda", torch.cuda.current_device()))


def _copies_of_peer(
    transfer: PartTransfer, sources: Sequence[list[torch.Tensor]]
) -> Iterator[list[torch.Tensor]]:
    """Yield the cuts of each bucket of another GPU, copied to memory of ours, a few buckets ahead."""
    reading, copying = torch.cuda.current_stream(), torch.cuda.Stream()
    queued: deque[tuple[list[torch.Tensor], torch.cuda.Event]] = deque()

    def first() -> list[torch.Tensor]:
        copies, event = queued.popleft()
        reading.wait_event(event)
        return copies

    for bucket, cuts in zip(transfer.plan.buckets, sources, strict=True):
        memory = memory_of(bucket, transfer, reading.device)
        copies = cuts_in(memory, bucket, transfer.manifest)
        copying.wait_stream(reading)  # reused memory may still be read
        with torch.cuda.stream(copying):
            # one call for all would be a kernel, which runs with the decoding kernels
            for copy, cut in zip(copies, cuts, strict=True):
                copy.copy_(cut, non_blocking=True)
            queued.append((copies, copying.record_event()))
        if len(queued) == AHEAD:
            yield first()
    while queued:
        yield first()
