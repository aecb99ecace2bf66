"""Receives slices of a version from the trainer's ranks, one rank after the other.

The dialogue with each is in `trainer/weights/parts/channel.py` (nccl) and `trainer/weights/parts/handles.py`
(ipc). One at a time, because a rank serves a limited number of receivers: none holds a place at one rank
while it waits for one at another. Engine ranks begin at different trainer ranks. Rank 0 comes last: it also
sends the sums of what none has sent, with which the digests of all whole tensors are complete.
"""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.slices import BucketSizes, Wanted
from rollout.weights.base import Destination, ReceivedSlice, no_destination
from rollout.weights.connected_receiver import ConnectedReceiver
from rollout.weights.parts.plans import ReceiverPlans
from rollout.weights.parts.transfer import PartTransfer, ReceiverChannel
from rollout.weights.parts.verification import SliceVerification
from rollout.weights.sender_connection import SenderLine
from rollout.weights.verification import Deadline


class PartReceiver:
    """Keeps a connection to each trainer rank for the next version."""

    def __init__(self, make_channel: Callable[[], ReceiverChannel]) -> None:
        """Receive by channels that `make_channel` returns, one for each trainer rank."""
        self._make_channel = make_channel
        self.digest = 0
        """`manifest_digest` of the version received last, computed from its bytes if it was provisional."""
        self._connections: dict[str, tuple[ReceiverChannel, ConnectedReceiver]] = {}
        """By location."""
        self._plans = ReceiverPlans()
        self._closed = threading.Event()
        """`close` was called since the last `slices` began."""

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
        self._plans.use(manifest, wanted)
        complete = False
        try:
            for part in _rotated(self._plans.senders):
                yield from self._from_part(part, manifest, deadline, verification, place)
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
        place: Destination,
    ) -> Iterator[list[ReceivedSlice]]:
        location = manifest.parts[part].location
        channel, receiver = self._connections.get(location) or self._connect(location)

        def receive(answer: dict[str, Any], line: SenderLine) -> Iterator[list[ReceivedSlice]]:
            plan, spans = self._plans.slices_from(manifest, part, BucketSizes(*answer["sizes"]))
            transfer = PartTransfer(there, part, answer, plan, deadline, receiver.disconnected, line, place)
            for bucket in channel.slices(transfer):
                if self._closed.is_set():
                    raise ConnectionError("the receiver was closed")
                found = []
                for cut, tensor in bucket:
                    verification.add(cut.tensor, cut.box, tensor)
                    found.append(ReceivedSlice(manifest.tensors[cut.tensor], cut.box, tensor))
                yield found
            verification.launch()
            if count := sum(end - first for _, first, end in spans):
                verification.add_sums(spans, channel.sums(transfer, count))

        def finish(disconnected: Callable[[], bool]) -> None:
            verification.wait(deadline, disconnected)
            if part == 0:
                verification.finish()

        there = replace(manifest, location=location)
        yield from receiver.transfer(there, deadline, receive, finish, self._plans.encoded)

    def _connect(self, location: str) -> tuple[ReceiverChannel, ConnectedReceiver]:
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
