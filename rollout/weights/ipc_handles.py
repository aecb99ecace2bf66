"""Transport `ipc`: reads slices in a trainer rank's memory; sender: `trainer/weights/served/ipc_handles.py`.

`location` is "HOST:PORT/cuda", or "HOST:PORT/cpu" if the trainer has no GPU and its pieces are in host
memory. Host memory and memory of the engine's own GPU are read in place. Cuts in memory of another GPU, which
need not be visible to this process, are copied a few buckets ahead of the reader: dense cuts by the copy
engines, and large cuts directly to their destinations.
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
from rollout.weights.channel import MAX_BUCKETS_IN_FLIGHT, PartTransfer, memory_of
from rollout.weights.sender_connection import parse_location

VERSIONS = 2
"""Versions in a trainer rank's memory, which reuses their buckets."""
UNLIMITED = 1 << 62
"""Unlimited bucket size, bytes."""
DEVICES = ("cpu", "cuda")
"""Possible devices of a trainer rank's pieces."""


class HandleSlices:
    """Channel that maps the buckets of one trainer rank."""

    def __init__(self) -> None:
        self._mapped: dict[int, torch.Tensor] = {}
        """Bucket number on the wire -> mapped bucket."""
        self._plan: Transfer | None = None
        self._sizes: tuple[int, ...] = ()
        """Bucket sizes of the trainer rank according to the plan, bytes."""
        self._places: tuple[PiecePlace, ...] = ()
        """Places of its pieces in the buckets."""
        self._sources: dict[tuple[int, ...], list[list[torch.Tensor]]] = {}
        """Numbers of mapped buckets -> elements of each cut, by bucket of the plan."""

    def address(self, manifest: WeightManifest) -> tuple[str, int]:
        host, port, device = parse_location(manifest.location, DEVICES)
        if device == "cuda" and not torch.cuda.is_available():
            raise WeightError(
                f"version {manifest.version}: transport ipc shares GPU memory, and this engine has no GPU; "
                "use shm"
            )
        return host, port

    def sizes(self, answer: dict[str, Any]) -> BucketSizes:
        """Return unlimited sizes for memory of this GPU, whose cuts are read in place without buckets."""
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
        # After a disconnect the trainer may overwrite its memory, and the next version has the same
        # destinations.
        if torch.cuda.is_available():
            with suppress(RuntimeError):
                torch.cuda.synchronize()

    def interrupt(self) -> None:
        """Return immediately: no thread waits for the sender, and bytes are verified after the copy."""

    def release(self) -> None:
        self._mapped, self._plan, self._sources = {}, None, {}

    def _sources_of(self, transfer: PartTransfer) -> list[list[torch.Tensor]]:
        """Return the elements of each cut, by bucket, in the trainer rank's memory."""
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
        """Return the sender's buckets, mapped into this process, uint8.

        Raises:
            WeightError: the sender is on another host, or number or size of the buckets is wrong.
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
    """Return whether the memory is on this process's GPU."""
    return gpu != HOST and gpu == gpu_of(torch.device("cuda", torch.cuda.current_device()))


def _copies_of_peer(
    transfer: PartTransfer, sources: Sequence[list[torch.Tensor]]
) -> Iterator[list[torch.Tensor]]:
    """Yield the cuts of each bucket of another GPU, copied to this GPU a few buckets ahead."""
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
            # a single fused call would be a kernel, which competes with the decoding kernels
            for copy, cut in zip(copies, cuts, strict=True):
                copy.copy_(cut, non_blocking=True)
            queued.append((copies, copying.record_event()))
        if len(queued) == MAX_BUCKETS_IN_FLIGHT:
            yield first()
    while queued:
        yield first()
