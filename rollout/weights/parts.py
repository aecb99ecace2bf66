"""Receives slices of a version from the trainer's ranks, one rank after the other.

The dialogue with each is in `trainer/weights/parts/channel.py`. One at a time, because a rank serves a
limited number of receivers: none holds a place at one rank while it waits for one at another. Engine ranks
begin at different trainer ranks. Rank 0 comes last: it also sends the sums of what none has sent, with which
the digests of all whole tensors are complete.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from protocol.device.pair_store import Line
from protocol.device.slice_digests import slice_sums
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.boxes import Box, shape_of
from protocol.weights.buckets import manifest_digest
from protocol.weights.digests import digest_of_sums, rows_of
from protocol.weights.provisional import is_provisional, with_digests
from protocol.weights.slices import (
    Cut,
    Transfer,
    Wanted,
    encode_wanted,
    rest_spans,
    senders_of,
    sum_span,
    transfer_of,
    untouched_spans,
)
from rollout.weights.connected_receiver import ConnectedReceiver
from rollout.weights.nccl import PairChannel
from rollout.weights.verification import Deadline, compare, refuse_if, wait_for_queue


class ReceivedSlice(NamedTuple):
    """Received elements of a tensor."""

    entry: TensorEntry
    box: Box
    tensor: torch.Tensor
    """Just these elements, in their shape; valid until the next slice is requested."""


class PartReceiver:
    """Keeps a connection to each trainer rank for the next version."""

    def __init__(self) -> None:
        self.digest = 0
        """`manifest_digest` of the version received last, computed from its bytes if it was provisional."""
        self._connections: dict[str, tuple[PairChannel, ConnectedReceiver]] = {}
        """By location."""
        self._closed = threading.Event()
        """`close` was called since the last `slices` began."""

    def slices(self, manifest: WeightManifest, wanted: Wanted, deadline_s: float) -> Iterator[ReceivedSlice]:
        """Yield every wanted element once. All is verified only once the iterator has ended without an error.

        Args:
            manifest: a version with parts.
            wanted: disjoint boxes.
            deadline_s: seconds within which all of it must have been received.

        Raises:
            WeightError: bytes are missing or wrong, or not there in time; the connections are closed.
        """
        self._closed.clear()
        deadline = Deadline(manifest, deadline_s)
        self._forget_others({part.location for part in manifest.parts})
        verification = SliceVerification(manifest)
        complete = False
        try:
            for part in _rotated(senders_of(manifest, wanted)):
                yield from self._from_part(part, manifest, wanted, deadline, verification)
            complete = True
        finally:
            if not complete:
                self.close()
        self.digest = verification.digest

    def close(self) -> None:
        """Disconnect from all ranks; wakes a thread that waits for one. Idempotent."""
        self._closed.set()
        for _, receiver in list(self._connections.values()):
            receiver.close()

    def _from_part(
        self,
        part: int,
        manifest: WeightManifest,
        wanted: Wanted,
        deadline: Deadline,
        verification: "SliceVerification",
    ) -> Iterator[ReceivedSlice]:
        location = manifest.parts[part].location
        channel, receiver = self._connections.get(location) or self._connect(location)

        def receive(answer: dict[str, Any], line: Line) -> Iterator[ReceivedSlice]:
            device = channel.join(answer, there, deadline, line)
            transfer = transfer_of(manifest, part, wanted, int(answer["bucket_bytes"]))
            buckets = _memories(transfer.buckets, device)
            for bucket, memory in channel.received(buckets, deadline, receiver.disconnected):
                if self._closed.is_set():
                    raise ConnectionError("the receiver was closed")
                for cut in bucket:
                    entry = manifest.tensors[cut.tensor]
                    tensor = _view(entry, cut, memory)
                    verification.add(cut.tensor, cut.box, tensor)
                    yield ReceivedSlice(entry, cut.box, tensor)
            spans = rest_spans(manifest, part, transfer)
            spans += untouched_spans(manifest, wanted) if part == 0 else []
            rows = sum(end - first for _, first, end in spans)
            sums = torch.empty(rows, dtype=torch.int64, device=device)
            for _ in channel.received(
                [(None, sums.view(torch.uint8))] if rows else [], deadline, receiver.disconnected
            ):
                verification.add_sums(spans, sums)

        def finish(disconnected: Callable[[], bool]) -> None:
            verification.wait(deadline, disconnected)
            if part == 0:
                verification.finish()

        there = replace(manifest, location=location)
        yield from receiver.transfer(there, deadline, receive, finish, encode_wanted(wanted))

    def _connect(self, location: str) -> tuple[PairChannel, ConnectedReceiver]:
        channel = PairChannel()
        self._connections[location] = channel, ConnectedReceiver(channel)
        return self._connections[location]

    def _forget_others(self, locations: set[str]) -> None:
        """Disconnect from ranks that serve no more, of a trainer that has ended."""
        for location in [known for known in self._connections if known not in locations]:
            self._connections.pop(location)[1].close()


class SliceVerification:
    """Adds up the sums of all slices of a version, received or not, and compares its tensors' digests."""

    def __init__(self, manifest: WeightManifest) -> None:
        self._manifest = manifest
        self._sums: dict[int, torch.Tensor] = {}
        """Index of the tensor -> sums of all of its rows, where its slices lie."""
        self.digest = 0
        """That of the version, once `finish` has returned."""

    def add(self, index: int, box: Box, tensor: torch.Tensor) -> None:
        """Add a received slice; it is read on the current stream."""
        entry = self._manifest.tensors[index]
        first, end = sum_span(entry, box)
        self._of(index, tensor.device)[first:end] += slice_sums(tensor, entry.shape, box)

    def add_sums(self, spans: Iterable[tuple[int, int, int]], sums: torch.Tensor) -> None:
        """Add sums that follow each other: (tensor, first row, after the last) of each."""
        position = 0
        for index, first, end in spans:
            self._of(index, sums.device)[first:end] += sums[position : position + end - first]
            position += end - first

    def wait(self, deadline: Deadline, disconnected: Callable[[], bool]) -> None:
        """Wait for what was queued on a GPU. Raises WeightError if it does not come, or not in time."""
        if any(sums.is_cuda for sums in self._sums.values()):
            wait_for_queue(self._manifest, deadline, disconnected)
        else:
            refuse_if(disconnected, self._manifest)

    def finish(self) -> None:
        """Compare the digests, or with a provisional manifest compute that of the version.

        Raises:
            WeightError: a tensor's bytes do not match its digest; names the tensor.
        """
        manifest = self._manifest
        digests = []
        for index, entry in enumerate(manifest.tensors):
            sums = self._sums.get(index)
            rows = torch.zeros(rows_of(entry.nbytes), dtype=torch.int64) if sums is None else sums.cpu()
            digests.append(digest_of_sums(rows.numpy(), entry.nbytes))
        if is_provisional(manifest):
            self.digest = manifest_digest(with_digests(manifest, digests).tensors)
            return
        for entry, found in zip(manifest.tensors, digests, strict=True):
            compare(entry, found)
        self.digest = manifest.digest

    def _of(self, index: int, device: torch.device) -> torch.Tensor:
        if index not in self._sums:
            rows = rows_of(self._manifest.tensors[index].nbytes)
            self._sums[index] = torch.zeros(rows, dtype=torch.int64, device=device)
        return self._sums[index]


def _rotated(senders: list[int]) -> list[int]:
    """Let engine ranks begin at different trainer ranks; the last stays the last."""
    *others, last = senders
    first = os.getpid() % len(others) if others else 0
    return [*others[first:], *others[:first], last]


def _memories(
    buckets: Iterable[tuple[Cut, ...]], device: torch.device
) -> Iterator[tuple[tuple[Cut, ...], torch.Tensor]]:
    for bucket in buckets:
        yield bucket, torch.empty(Transfer.nbytes(bucket), dtype=torch.uint8, device=device)


def _view(entry: TensorEntry, cut: Cut, memory: torch.Tensor) -> torch.Tensor:
    part = memory[cut.offset : cut.offset + cut.nbytes].view(getattr(torch, entry.dtype))
    return part.view(shape_of(cut.box))
