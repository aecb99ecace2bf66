"""Transport `nccl`: receives slices through process groups of two ranks.

The sender is `trainer/weights/served/nccl_pairs.py`. `location` is "HOST:PORT/BACKEND". Protocol:

    receiver -> sender   {"version": v, "epoch": e, "layout": d, "slices": n} and n bytes: the wanted slices
    sender -> receiver   {"join": true}      first request: both create a group, rank 0 the sender, which is
    receiver -> sender   {"joining": true}   kept for the next versions; they find each other by the lines of
                                             `protocol/device/pair_group.py`
                         {"ready": true}     later requests; either answer also has the sizes of buckets
    both                 a byte, broadcast by rank 0 in a new group, which completes a GPU's communicator
    both                 the buckets of `protocol.weights.slices.transfer_of`, one broadcast each; or their
                         changes, each announced by {"bucket": [w, n]}; then sums
    receiver -> sender   {"done": v}

Changes are applied to the last version at the destinations, or to a copy of it; tensors without a destination
are sent whole.

The group is aborted on any error. Each receiver has its own group. An engine that hangs or dies therefore
delays no other engine, and no group must be rebuilt when a member leaves. The collectives also need no
ordering with the engine's. Large slices are received directly at their destination, a few buckets ahead of
the reader. On GPU everything is queued on the current stream, and the host waits once at the end, with a
deadline. An aborted collective may return with partial buffers, so only digests prove that a tensor is
complete.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from protocol.device.changes import Changes, apply
from protocol.device.cut_memory import cuts_in, words_in
from protocol.device.pair_group import BACKENDS, RECEIVER, abort, join_pair
from protocol.messages import WeightManifest
from protocol.weights.deltas import GAP_WIDTHS, WHOLE, coded_bytes
from protocol.weights.slices import BucketSizes, Cut
from rollout.weights.channel import MAX_BUCKETS_IN_FLIGHT, PartTransfer, memory_of
from rollout.weights.sender_connection import parse_location

T = TypeVar("T")
Expected = tuple[tuple[Cut, ...], torch.Tensor, Changes | None]
"""(bucket, its memory, its changes); changes None: the whole bucket is sent."""


class PairSlices:
    """Channel that receives packed cuts of one trainer rank, then sums, as rank 1 of a group of two."""

    def __init__(self) -> None:
        self.group: Any = None
        self.read = 0
        """Bytes of buckets and changes received for the last version."""
        self._device = torch.device("cpu")

    def address(self, manifest: WeightManifest) -> tuple[str, int]:
        host, port, backend = parse_location(manifest.location, BACKENDS)
        is_gpu = backend == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
        return host, port

    def sizes(self, answer: dict[str, Any]) -> BucketSizes:
        return BucketSizes(*answer["sizes"])

    def slices(self, transfer: PartTransfer) -> Iterator[list[tuple[Cut, torch.Tensor]]]:
        self._join(transfer)
        self.read = 0
        for (bucket, memory, changes), _ in self._received(self._buckets(transfer), transfer):
            if changes is not None:
                _change(bucket, memory, changes, transfer)
            yield list(zip(bucket, cuts_in(memory, bucket, transfer.manifest), strict=True))

    def sums(self, transfer: PartTransfer, count: int) -> torch.Tensor:
        sums = torch.empty(count, dtype=torch.int64, device=self._device)
        for _ in self._received([(None, sums.view(torch.uint8))], transfer):
            pass
        return sums

    def drain_device(self) -> None:
        """Return immediately: aborting the group waits."""

    def interrupt(self) -> None:
        """Abort the group, which ends NCCL's collectives immediately.

        Gloo has no abort: its collectives end with the connection to the sender, or at their deadline.
        """
        if self.group is not None:
            abort(self.group)

    def release(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            abort(group)

    def _join(self, transfer: PartTransfer) -> None:
        """Create the group if the sender's answer requests it."""
        if "join" in transfer.answer:
            transfer.line.send({"joining": True})
            seconds = transfer.deadline.remaining("joining the group")
            self.group = join_pair(transfer.line, RECEIVER, self._device, seconds)

    def _buckets(self, transfer: PartTransfer) -> Iterator[tuple[Expected, torch.Tensor]]:
        """Yield each bucket with its memory and changes, and the memory to receive into."""
        for bucket in transfer.plan.buckets:
            memory, changes = memory_of(bucket, transfer, self._device), None
            if "changes" in transfer.answer:
                changes = self._announced(words_in(memory, bucket, transfer.manifest), transfer.line.wait())
            sent = memory if changes is None else changes.data
            self.read += len(sent)
            yield (bucket, memory, changes), sent

    def _announced(self, words: torch.Tensor, message: dict[str, Any]) -> Changes | None:
        """Return memory for the announced changes; None if the whole bucket is sent. Raises ValueError."""
        width, count = message["bucket"]
        if (width, count) == (WHOLE, len(words)):
            return None
        nbytes = coded_bytes(width, count, words.itemsize)
        if width not in GAP_WIDTHS or count < 0 or nbytes >= words.nbytes:
            raise ValueError(f"the sender announced {count} changes of {len(words)} elements, width {width}")
        return Changes(width, count, torch.empty(nbytes, dtype=torch.uint8, device=self._device))

    def _received(
        self, memories: Iterable[tuple[T, torch.Tensor]], transfer: PartTransfer
    ) -> Iterator[tuple[T, torch.Tensor]]:
        """Yield each memory (uint8) after it has its bytes; a few broadcasts are in flight."""
        queued: deque[tuple[T, torch.Tensor, Any]] = deque()
        for bucket, memory in memories:
            queued.append((bucket, memory, self._broadcast(memory, transfer) if len(memory) else None))
            if len(queued) == MAX_BUCKETS_IN_FLIGHT:
                yield _received(*queued.popleft())
        while queued:
            yield _received(*queued.popleft())

    def _broadcast(self, memory: torch.Tensor, transfer: PartTransfer) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=transfer.deadline.remaining("receiving"))
        group = self.group
        if group is None or transfer.disconnected():  # an aborted group would create another communicator
            raise RuntimeError("the connection was closed")
        return group.broadcast([memory], options)


def _received(bucket: T, memory: torch.Tensor, work: Any) -> tuple[T, torch.Tensor]:
    if work is not None:
        work.wait()  # nccl: the stream waits, not the host
    return bucket, memory


def _change(bucket: tuple[Cut, ...], memory: torch.Tensor, changes: Changes, transfer: PartTransfer) -> None:
    """Reconstruct a bucket from the last version at the destinations of its cuts, and its changes.

    Raises:
        ValueError: a cut has no destination, although the sender was informed.
    """
    manifest = transfer.manifest
    kept = [transfer.place(manifest.tensors[cut.tensor].name, cut.box) for cut in bucket]
    sources = [tensor for tensor in kept if tensor is not None]
    if len(sources) < len(bucket):
        raise ValueError("the sender sent changes of a tensor that this end does not keep")
    if sources[0].data_ptr() != memory.data_ptr():
        torch._foreach_copy_(cuts_in(memory, bucket, manifest), sources)
    apply(changes, words_in(memory, bucket, manifest))
