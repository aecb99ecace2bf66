"""Sends one rank's cuts of a version to engine ranks, through process groups of two, one for each.

The dialogue, on the connection of `trainer/weights/version_server.py`, with the slices that the receiver
wants in its request:

    sender -> receiver   {"join": true}      first request: both create a group, rank 0 the sender, which is
    receiver -> sender   {"joining": true}   kept for the next versions; they find each other by the lines of
                                             `protocol/device/pair_store.py`
                         {"ready": true}     later requests. Either answer also has {"sizes": [n, m]}, see
                                             `protocol.weights.slices.BucketSizes`
    both                 a byte, broadcast by rank 0 in a new group, which completes a GPU's communicator
    both                 the buckets of `protocol.weights.slices.transfer_of`, one broadcast each
    both                 the sums of the unsent parts of cut pieces; from rank 0 also the sums of pieces
                         that no rank has sent. int64, in one broadcast
    receiver -> sender   {"done": v}

With a group per receiver, one that hangs or dies delays no other, and the default process group is not
touched. The version is kept in memory of its own on the trainer's device, so the next training step does not
wait for transfers.
"""

import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from protocol.device.cut_memory import cuts_in
from protocol.device.pair_group import ALONE, SENDER, abort
from protocol.device.pair_store import join_pair
from protocol.messages import WeightManifest
from protocol.weights.boxes import relative
from protocol.weights.slices import BucketSizes, Cut, Transfer
from trainer.weights.parts.plans import SenderPlans
from trainer.weights.parts.sums import Numbered, rest_sums, untouched_sums
from trainer.weights.receiver_connection import ConnectionLine, ReceiverConnection, remaining_s
from trainer.weights.streamed_buckets import full_bucket
from trainer.weights.version_server import CLOSE_S, ServedVersion

POLL_S = 0.0005
"""Interval at which a transfer on a GPU is polled: a wait in the driver would have no deadline."""
PACKED = 2
"""Buckets on a GPU that are packed and not sent yet: one is filled while the one before is sent."""


class PartChannel:
    """Sends cuts of one rank's pieces to one receiver, as rank 0 of a group of two."""

    def __init__(self, backend: str, device: torch.device, *, part: int, bucket_bytes: int) -> None:
        """Send from `device` what rank `part` has, in buckets of at most this size."""
        self._device = device
        self._part = part
        self._sizes = BucketSizes(bucket_bytes, min(bucket_bytes, ALONE[backend]))
        self._plans = SenderPlans(part, self._sizes)
        self._group: Any = None
        self._stream: torch.cuda.Stream | None = None
        """Stream of all versions: torch keeps freed memory for the stream on which it was allocated."""

    def send(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        if self._group is None:
            self._group = self._join(connection, end)
        else:
            connection.answer({"ready": True, "sizes": self._sizes}, end)
        # Aborting the group ends what blocks in a library or on the GPU.
        watchdog = threading.Timer(remaining_s(end), abort, args=(self._group,))
        watchdog.daemon = True
        watchdog.start()
        try:
            if self._device.type == "cuda":
                self._send_on_stream(connection, served, end)
            else:
                self._broadcast(connection, served, end)
            connection.wait_done(served.manifest.version, end)
        except BaseException:
            self.close()
            raise
        finally:
            watchdog.cancel()
            # If the timer's thread dropped the last reference to the group while the interpreter shuts down,
            # the process would crash.
            watchdog.join(CLOSE_S)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            abort(group)

    def _join(self, connection: ReceiverConnection, end: float) -> Any:
        connection.answer({"join": True, "sizes": self._sizes}, end)
        # The group is not created before the receiver is there: if it never came, a thread would be stuck.
        if connection.request(end) != {"joining": True}:
            raise ValueError("a receiver disconnected before it had joined the group")
        return join_pair(ConnectionLine(connection, end), SENDER, self._device, remaining_s(end))

    def _broadcast(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        manifest = served.manifest
        plan = self._plans.plan(connection.wanted, manifest)

        def published(number: int) -> torch.Tensor:
            return full_bucket(connection, served.streamed, number, end)

        def collected(number: int) -> torch.Tensor:
            return full_bucket(connection, served.collected, number, end)

        queued: deque[torch.cuda.Event] = deque()
        for bucket in plan.transfer.buckets:
            sources = self._cuts(bucket, manifest, published)
            if len(sources) == 1 and sources[0].is_contiguous():
                self._send_bytes(sources[0].view(-1).view(torch.uint8), end)
                continue
            memory = torch.empty(Transfer.nbytes(bucket), dtype=torch.uint8, device=self._device)
            torch._foreach_copy_(cuts_in(memory, bucket, manifest), sources)
            self._send_bytes(memory, end)
            self._wait_sent(queued, connection, end)
        rest = rest_sums(manifest, self._part, plan, published, self._device)
        others = untouched_sums(manifest, plan, collected)
        if len(rest) + len(others):
            self._send_bytes(torch.cat([rest, others.to(self._device)]).view(torch.uint8), end)

    def _cuts(
        self, bucket: tuple[Cut, ...], manifest: WeightManifest, published: Numbered
    ) -> list[torch.Tensor]:
        """Return the elements of a bucket's cuts in their pieces; waits for these."""
        pieces = manifest.parts[self._part].pieces
        return [published(cut.piece)[relative(cut.box, pieces[cut.piece].box)] for cut in bucket]

    def _wait_sent(self, queued: deque[torch.cuda.Event], connection: ReceiverConnection, end: float) -> None:
        """On a GPU, wait until all packed buckets but the last are sent: their memory is used again."""
        if self._device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()
        queued.append(event)
        while len(queued) >= PACKED:
            if queued[0].query():
                queued.popleft()
            elif connection.disconnected(POLL_S):
                raise ValueError("a receiver disconnected in the middle of a version")
            remaining_s(end)

    def _send_bytes(self, memory: torch.Tensor, end: float) -> None:
        """Send uint8 [n]; on a GPU it is queued on the current stream."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=remaining_s(end))
        self._group.broadcast([memory], options).wait()

    def _send_on_stream(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        """Queue all buckets and wait until they are sent, the receiver disconnects, or time is up."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # not the stream that trains
        with torch.cuda.stream(self._stream):
            self._broadcast(connection, served, end)
            sent = torch.cuda.Event()
            sent.record()
        while not sent.query():
            if connection.disconnected(POLL_S):
                raise ValueError("a receiver disconnected in the middle of a version")
            remaining_s(end)
