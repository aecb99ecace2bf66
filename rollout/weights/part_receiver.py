"""Receives slices of a version from the trainer's ranks, one rank after the other.

The protocol of each rank is in `nccl_pairs.py` and `ipc_handles.py` of `trainer/weights/served/`. A rank
serves a limited number of receivers. Receiving from one rank at a time ensures that no receiver occupies one
rank while it waits for another. Engine ranks start at different trainer ranks. Rank 0 comes last. It also
sends the sums of the parts that no rank sent, which complete the digests of all whole tensors.
"""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace

from protocol.errors import WeightError
from protocol.host.line_connection import TimedLine
from protocol.messages import WeightManifest
from protocol.weights.buckets import layout_digest
from protocol.weights.slices import BucketSizes, Cut, Transfer, Wanted, encode_wanted, senders_of, transfer_of
from rollout.weights.base import Destination, ReceivedSlice, no_destination
from rollout.weights.channel import PartTransfer, ReceiverChannel
from rollout.weights.connected_receiver import ConnectedReceiver
from rollout.weights.verification import Deadline, SliceVerification


@dataclass(slots=True)
class Plans:
    """Transfer plans for versions of one layout.

    Planning a model with hundreds of tensors takes tens of milliseconds of Python time, which the engine's
    steps also need.
    """

    layout: int
    boxes: bytes
    """Encoded wanted slices."""
    encoded: bytes
    """Encoded wanted slices including `discarded`."""
    discarded: frozenset[str]
    """Tensors without a destination; their values are lost by the next version."""
    place: Destination
    """Destinations of the slices."""
    senders: list[int]
    """Ranks to request from, see `senders_of`."""
    by_part: dict[tuple[int, BucketSizes], Transfer] = field(default_factory=dict)
    """(part, bucket sizes) -> plan, created on demand."""


class PartReceiver:
    """Receiver with a persistent connection to each trainer rank."""

    is_persistent = False
    is_lockable = False

    def __init__(self, make_channel: Callable[[], ReceiverChannel]) -> None:
        """Receive through channels created by `make_channel`, one per trainer rank."""
        self._make_channel = make_channel
        self.digest = 0
        """`manifest_digest` of the last received version, computed from its bytes if it was provisional."""
        self._connections: dict[str, tuple[ReceiverChannel, ConnectedReceiver]] = {}
        """Location -> (channel, receiver)."""
        self._plans = Plans(0, b"", b"", frozenset(), no_destination, [])
        self._closed = threading.Event()
        """Set if `close` was called since the last `slices` began."""

    def slices(
        self,
        manifest: WeightManifest,
        wanted: Wanted,
        deadline_s: float,
        place: Destination = no_destination,
    ) -> Iterator[list[ReceivedSlice]]:
        """Yield every wanted element once, see `WeightReceiver`; on an error the connections are closed."""
        if not manifest.parts:
            raise WeightError(f"version {manifest.version}: the manifest does not say where its parts are")
        self._closed.clear()
        deadline = Deadline(manifest, deadline_s)
        self._forget_others({part.location for part in manifest.parts})
        verification = SliceVerification(manifest)
        keeps = self._has_planned(manifest, wanted, place)
        complete = False
        try:
            for part in _rotated(self._plans.senders):
                yield from self._from_part(part, manifest, wanted, deadline, verification, keeps)
            complete = True
        finally:
            if not complete:
                self.close()
        self.digest = verification.digest

    def close(self) -> None:
        """Disconnect from all ranks, and wake a thread that waits for one. Idempotent."""
        self._closed.set()
        for _, receiver in list(self._connections.values()):
            receiver.close()

    def _has_planned(self, manifest: WeightManifest, wanted: Wanted, place: Destination) -> bool:
        """Plan a version; return whether the previous version had the same plan and destinations."""
        layout, boxes = layout_digest(manifest), encode_wanted(wanted)
        known = self._plans
        if (layout, boxes, place) == (known.layout, known.boxes, known.place):
            return True
        discarded = frozenset(
            name for name, found in wanted.items() if any(place(name, box) is None for box in found)
        )
        encoded = encode_wanted(wanted, discarded)
        self._plans = Plans(layout, boxes, encoded, discarded, place, senders_of(manifest, wanted))
        return False

    def _from_part(
        self,
        part: int,
        manifest: WeightManifest,
        wanted: Wanted,
        deadline: Deadline,
        verification: SliceVerification,
        keeps: bool,
    ) -> Iterator[list[ReceivedSlice]]:
        place = self._plans.place
        location = manifest.parts[part].location
        channel, receiver = self._connections.get(location) or self._connect(location)

        def receive(answer: dict[str, Any], line: TimedLine) -> Iterator[list[ReceivedSlice]]:
            key = part, channel.sizes(answer)
            plan = self._plans.by_part.get(key)
            if plan is None:
                plan = transfer_of(manifest, part, wanted, key[1], self._plans.discarded)
                self._plans.by_part[key] = plan
            transfer = PartTransfer(there, part, answer, plan, deadline, receiver.disconnected, line, place)
            for bucket in map(list, channel.slices(transfer)):
                if self._closed.is_set():
                    raise ConnectionError("the receiver was closed")
                slices = [_placed(manifest, cut, tensor, verification, place) for cut, tensor in bucket]
                if any(part.tensor is not tensor for part, (_, tensor) in zip(slices, bucket, strict=True)):
                    verification.launch()  # launch copies them
                yield slices
            verification.launch()
            if plan.rows:
                verification.add_sums(plan.spans, channel.sums(transfer, plan.rows))
            verification.wait(deadline, receiver.disconnected)
            if part == 0:
                verification.finish()

        there = replace(manifest, location=location)
        yield from receiver.transfer(there, deadline, receive, self._plans.encoded, keeps=keeps)

    def _connect(self, location: str) -> tuple[ReceiverChannel, ConnectedReceiver]:
        channel = self._make_channel()
        self._connections[location] = channel, ConnectedReceiver(channel)
        return self._connections[location]

    def _forget_others(self, locations: set[str]) -> None:
        """Disconnect from ranks that are not in `locations`, such as those of an ended trainer."""
        for location in [known for known in self._connections if known not in locations]:
            self._connections.pop(location)[1].close()


def _placed(
    manifest: WeightManifest,
    cut: Cut,
    tensor: torch.Tensor,
    verification: SliceVerification,
    place: Destination,
) -> ReceivedSlice:
    """Verify a cut; in the same pass, copy it to its destination if it is not there yet."""
    entry = manifest.tensors[cut.tensor]
    target = place(entry.name, cut.box)
    if target is not None and (target.device != tensor.device or not target.is_contiguous()):
        target = None
    if target is not None and target.data_ptr() == tensor.data_ptr():
        target = None
    verification.add(cut.tensor, cut.box, tensor, target)
    return ReceivedSlice(entry, cut.box, tensor if target is None else target)


def _rotated(senders: list[int]) -> list[int]:
    """Rotate the order so that engine ranks start at different trainer ranks; the last stays last."""
    *others, last = senders
    first = os.getpid() % len(others) if others else 0
    return [*others[first:], *others[:first], last]
