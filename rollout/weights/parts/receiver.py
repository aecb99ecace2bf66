"""Receives slices of a version from the trainer's ranks, one rank after the other.

The dialogue with each is in `trainer/weights/parts/channel.py` (nccl) and `trainer/weights/parts/handles.py`
(ipc). One at a time, because a rank serves a limited number of receivers: none holds a place at one rank
while it waits for one at another. Engine ranks begin at different trainer ranks. Rank 0 comes last: it also
sends the sums of what none has sent, with which the digests of all whole tensors are complete.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from msgspec.structs import replace

from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.boxes import Box
from protocol.weights.slices import Cut, Transfer, Wanted
from rollout.weights.connected_receiver import ConnectedReceiver, ReceiverChannel
from rollout.weights.parts.plans import ReceiverPlans
from rollout.weights.parts.verification import SliceVerification
from rollout.weights.sender_connection import SenderLine
from rollout.weights.verification import Deadline


class ReceivedSlice(NamedTuple):
    """Received elements of a tensor."""

    entry: TensorEntry
    box: Box
    tensor: torch.Tensor
    """Just these elements, in their shape."""


class PartTransfer(NamedTuple):
    """One trainer rank's part of the transfer of a version to this engine rank."""

    manifest: WeightManifest
    """With the location of that rank."""
    part: int
    answer: dict[str, Any]
    """The rank's answer to the request."""
    plan: Transfer
    deadline: Deadline
    disconnected: Callable[[], bool]
    """Returns whether the rank has disconnected or the receiver was closed."""
    line: SenderLine


class SliceChannel(ReceiverChannel, Protocol):
    """How a connection to one trainer rank transfers slices."""

    def slices(self, transfer: PartTransfer) -> Iterator[Iterable[tuple[Cut, torch.Tensor]]]:
        """Yield every cut of the plan with its elements, in its shape: many at a time, until the next."""

    def sums(self, transfer: PartTransfer, count: int) -> torch.Tensor:
        """Return the sums that the rank sends behind the slices: int64 [count], where the slices were."""


class PartReceiver:
    """Keeps a connection to each trainer rank for the next version."""

    def __init__(self, make_channel: Callable[[], SliceChannel]) -> None:
        """Receive by channels that `make_channel` returns, one for each trainer rank."""
        self._make_channel = make_channel
        self.digest = 0
        """`manifest_digest` of the version received last, computed from its bytes if it was provisional."""
        self._connections: dict[str, tuple[SliceChannel, ConnectedReceiver]] = {}
        """By location."""
        self._plans = ReceiverPlans()
        self._closed = threading.Event()
        """`close` was called since the last `slices` began."""

    def slices(
        self, manifest: WeightManifest, wanted: Wanted, deadline_s: float
    ) -> Iterator[list[ReceivedSlice]]:
        """Yield every wanted element once: many slices at a time, which are valid until the next ones.

        All is verified only once the iterator has ended without an error.

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
        self._plans.use(manifest, wanted)
        complete = False
        try:
            for part in _rotated(self._plans.senders):
                yield from self._from_part(part, manifest, deadline, verification)
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
        deadline: Deadline,
        verification: SliceVerification,
    ) -> Iterator[list[ReceivedSlice]]:
        location = manifest.parts[part].location
        channel, receiver = self._connections.get(location) or self._connect(location)

        def receive(answer: dict[str, Any], line: SenderLine) -> Iterator[list[ReceivedSlice]]:
            plan, spans = self._plans.of_part(manifest, part, int(answer["bucket_bytes"]))
            transfer = PartTransfer(there, part, answer, plan, deadline, receiver.disconnected, line)
            for bucket in channel.slices(transfer):
                if self._closed.is_set():
                    raise ConnectionError("the receiver was closed")
                found = []
                for cut, tensor in bucket:
                    verification.add(cut.tensor, cut.box, tensor)
                    found.append(ReceivedSlice(manifest.tensors[cut.tensor], cut.box, tensor))
                verification.launch()
                yield found
            if count := sum(end - first for _, first, end in spans):
                verification.add_sums(spans, channel.sums(transfer, count))

        def finish(disconnected: Callable[[], bool]) -> None:
            verification.wait(deadline, disconnected)
            if part == 0:
                verification.finish()

        there = replace(manifest, location=location)
        yield from receiver.transfer(there, deadline, receive, finish, self._plans.encoded)

    def _connect(self, location: str) -> tuple[SliceChannel, ConnectedReceiver]:
        channel = self._make_channel()
        self._connections[location] = channel, ConnectedReceiver(channel)
        return self._connections[location]

    def _forget_others(self, locations: set[str]) -> None:
        """Disconnect from ranks that serve no more, of a trainer that has ended."""
        for location in [known for known in self._connections if known not in locations]:
            self._connections.pop(location)[1].close()


def _rotated(senders: list[int]) -> list[int]:
    """Let engine ranks begin at different trainer ranks; the last stays the last."""
    *others, last = senders
    first = os.getpid() % len(others) if others else 0
    return [*others[first:], *others[:first], last]
