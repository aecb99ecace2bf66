"""Implements transport `nccl`: sends a rank's cuts to each engine rank through a process group of two.

Protocol on the connection of `trainer/weights/served/version_server.py`; the request contains the slices:

    sender -> receiver   {"join": true}      first request: both create a group (sender: rank 0), which later
    receiver -> sender   {"joining": true}   versions reuse, by the lines of `protocol/device/pair_group.py`
    sender -> receiver   {"ready": true}     later requests. Both answers also contain {"sizes": [n, m]}, see
                                             `protocol.weights.slices.BucketSizes`
    both                 a byte, broadcast by rank 0 in a new group, which completes a GPU's communicator
    both                 the buckets of `protocol.weights.slices.transfer_of`, one broadcast each. With
                         {"changes": true} in the answer, a bucket contains the changes since the receiver's
                         last confirmed version on this connection, and is announced:
    sender -> receiver   {"bucket": [w, n]}  as in `protocol.device.changes.Changes`; no broadcast if n is 0
    both                 the sums of the unsent parts of cut pieces; from rank 0 also the sums of pieces
                         that no rank has sent. int64, in one broadcast
    receiver -> sender   {"done": v}

Each receiver has a group of its own, so a receiver that hangs or dies does not delay others, and the default
process group is not used. The version is copied to separate memory on the trainer's device, so the next
training step does not wait for transfers. With `weights.delta`, the previous version is kept, too; a receiver
with any other version gets all bytes.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from protocol.device.changes import Changes, encode_changes
from protocol.device.cut_memory import cuts_in, words_in
from protocol.device.pair_group import SENDER, abort, join_pair
from protocol.weights.boxes import relative
from protocol.weights.slices import BucketSizes, Cut, Transfer
from trainer.weights.served.channel import PartChannel
from trainer.weights.served.receiver_connection import ReceiverConnection, remaining_s
from trainer.weights.served.streamed_buckets import StreamedBuckets
from trainer.weights.served.version_server import CLOSE_S, ServedVersion

POLL_S = 0.0005
"""Polling interval of a GPU transfer, seconds; a wait in the driver would have no deadline."""
PACKED = 2
"""Maximum number of packed, unsent buckets: one is filled while the previous one is sent."""

CODING = threading.Lock()
"""Lock held while a bucket's changes are encoded, which needs several times the bucket's memory."""


class PairChannel(PartChannel):
    """Channel that sends cuts of one rank's pieces to one receiver, as rank 0 of a group of two."""

    def __init__(self, device: torch.device, part: int, sizes: BucketSizes) -> None:
        super().__init__(device, part, sizes)
        self._group: Any = None
        self._confirmed: weakref.ref[StreamedBuckets] | None = None
        """Last version that the receiver confirmed."""

    def send(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        base = self._base(connection, served)
        if self._group is None:
            self._group = self._join(connection, end)
        else:
            changes = {} if base is None else {"changes": True}
            connection.answer({"ready": True, "sizes": self.sizes, **changes}, end)
        self._confirmed = None
        # Aborting the group unblocks calls in a library or on the GPU.
        watchdog = threading.Timer(remaining_s(end), abort, args=(self._group,))
        watchdog.daemon = True
        watchdog.start()
        try:
            self._send_version(connection, served, base, end)
            connection.wait_done(served.manifest.version, end)
            self._confirmed = weakref.ref(served.streamed)
        except BaseException:
            self.close()
            raise
        finally:
            watchdog.cancel()
            # The process would crash if the timer's thread dropped the group during interpreter shutdown.
            watchdog.join(CLOSE_S)

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            abort(group)

    def _join(self, connection: ReceiverConnection, end: float) -> Any:
        connection.answer({"join": True, "sizes": self.sizes}, end)
        # Create the group only after the receiver has joined; otherwise a thread could be stuck.
        if connection.request(end) != {"joining": True}:
            raise ValueError("a receiver disconnected before it had joined the group")
        return join_pair(connection.line(end), SENDER, self.device, remaining_s(end))

    def _base(self, connection: ReceiverConnection, served: ServedVersion) -> ServedVersion | None:
        """Return the base version for sending changes to the receiver; None: send all bytes."""
        confirmed = self._confirmed() if self._confirmed is not None else None
        base = served.base if connection.keeps else None
        return base if base is not None and base.streamed is confirmed else None

    def _send_version(
        self,
        connection: ReceiverConnection,
        served: ServedVersion,
        base: ServedVersion | None,
        end: float,
    ) -> None:
        """Send all buckets, each while the next bucket is packed, then the sums.

        On a GPU, everything is queued and the host waits only at the end; for changes, also before each
        bucket. The wait ends when the data is sent, the receiver disconnects, or the deadline passes.
        """
        plan = self.plan(connection, served.manifest)
        sending: deque[tuple[Any, torch.Tensor]] = deque()
        with self.on_stream():
            for bucket in plan.buckets:
                if base is None:
                    memory = self._packed(bucket, connection, served, end)
                else:
                    memory = self._changes(bucket, connection, served, base, end)
                if not len(memory):
                    continue
                sending.append(self._broadcast(memory, end))
                if len(sending) == PACKED:
                    sending.popleft()[0].wait()  # nccl: the stream waits, then reuses the memory
            if plan.rows:
                sums = self.sums(connection, served, plan, end).to(self.device)
                sending.append(self._broadcast(sums.view(torch.uint8), end))
            for work, _ in sending:
                work.wait()
            self._await_stream(connection, end)

    def _await_stream(self, connection: ReceiverConnection, end: float) -> None:
        """Wait for the work queued on the current stream of a GPU.

        Raises:
            ValueError: the receiver has disconnected, so queued sends would wait for it.
            TimeoutError: the work is not done by `end`.
        """
        queued = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None
        while queued is not None and not queued.query():
            if connection.disconnected(POLL_S):
                raise ValueError("a receiver disconnected in the middle of a version")
            remaining_s(end)

    def _packed(
        self,
        bucket: tuple[Cut, ...],
        connection: ReceiverConnection,
        served: ServedVersion,
        end: float,
        make: Callable[..., torch.Tensor] = torch.empty,
    ) -> torch.Tensor:
        """Return a bucket's bytes, uint8, once its pieces are complete; a view if it is one dense cut."""
        manifest, pieces = served.manifest, served.manifest.parts[self.part].pieces
        cuts = [
            served.streamed.full(cut.piece, connection, end)[relative(cut.box, pieces[cut.piece].box)]
            for cut in bucket
        ]
        if len(cuts) == 1 and cuts[0].is_contiguous():
            return cuts[0].view(-1).view(torch.uint8)
        memory = make(Transfer.nbytes(bucket), dtype=torch.uint8, device=self.device)
        torch._foreach_copy_(cuts_in(memory, bucket, manifest), cuts)
        return memory

    def _changes(
        self,
        bucket: tuple[Cut, ...],
        connection: ReceiverConnection,
        served: ServedVersion,
        base: ServedVersion,
        end: float,
    ) -> torch.Tensor:
        """Return the changes of a bucket since the base, or all bytes, and announce them to the receiver."""
        manifest = served.manifest
        # zeros between the cuts, so the gaps do not look like changes
        new = words_in(self._packed(bucket, connection, served, end, torch.zeros), bucket, manifest)
        if manifest.tensors[bucket[0].tensor].name in self.discarded:  # and so are the bucket's others
            changes = Changes.all_of(new)
        else:
            old = words_in(self._packed(bucket, connection, base, end, torch.zeros), bucket, manifest)
            self._await_stream(connection, end)  # `encode_changes` waits in the driver, now only for its own
            if not CODING.acquire(timeout=remaining_s(end)):
                raise TimeoutError("other receivers' changes are being coded")
            try:
                changes = encode_changes(old, new)
            finally:
                CODING.release()
        connection.answer({"bucket": [changes.width, changes.elements]}, end)
        return changes.data

    def _broadcast(self, memory: torch.Tensor, end: float) -> tuple[Any, torch.Tensor]:
        """Begin to send uint8 [n]; return the pending work, and the memory, which must live until then."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=remaining_s(end))
        return self._group.broadcast([memory], options), memory
