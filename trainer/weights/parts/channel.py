"""Sends one rank's cuts of a version to one engine rank, packed a bucket at a time, and then sums.

The dialogue is that of `trainer/weights/nccl.py`, with the slices that the receiver wants in the request:

    sender -> receiver   the answer also has {"bucket_bytes": n}
    both                 the buckets of `protocol.weights.slices.transfer_of`, one broadcast each
    both                 the sums of what was not sent of the pieces that were cut; from rank 0 also those of
                         the pieces that no rank has sent anything of. int64, in one broadcast
    receiver -> sender   {"done": v}
"""

from collections import deque

import torch

from protocol.messages import WeightManifest
from protocol.weights.boxes import relative, shape_of
from protocol.weights.slices import Cut, Transfer
from trainer.weights.nccl import POLL_S, PairSenderChannel, full_bucket
from trainer.weights.parts.plans import SenderPlans
from trainer.weights.parts.sums import Numbered, rest_sums, untouched_sums
from trainer.weights.receiver_connection import ReceiverConnection, remaining_s
from trainer.weights.version_server import ServedVersion

PACKED = 2
"""Buckets on a GPU that are packed and not sent yet: one is filled while the one before is sent."""


class PartChannel(PairSenderChannel):
    """Sends cuts of one rank's pieces to one receiver."""

    def __init__(self, backend: str, device: torch.device, *, part: int, bucket_bytes: int) -> None:
        """Send from `device` what rank `part` has, in buckets of this size."""
        super().__init__(backend, device, {"bucket_bytes": bucket_bytes})
        self._part = part
        self._plans = SenderPlans(part, bucket_bytes)

    def _broadcast(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        manifest = served.manifest
        plan = self._plans.plan(connection.wanted, manifest)

        def published(number: int) -> torch.Tensor:
            return full_bucket(connection, served.streamed, number, end)

        def collected(number: int) -> torch.Tensor:
            return full_bucket(connection, served.collected, number, end)

        queued: deque[torch.cuda.Event] = deque()
        for bucket in plan.transfer.buckets:
            self._send_bytes(self._packed(bucket, manifest, published), end)
            self._wait_sent(queued, connection, end)
        rest = rest_sums(manifest, self._part, plan, published, self._device)
        others = untouched_sums(manifest, plan, collected)
        if len(rest) + len(others):
            self._send_bytes(torch.cat([rest, others.to(self._device)]).view(torch.uint8), end)

    def _packed(self, bucket: tuple[Cut, ...], manifest: WeightManifest, published: Numbered) -> torch.Tensor:
        """Return the bytes of a bucket; waits for its pieces."""
        memory = torch.empty(Transfer.nbytes(bucket), dtype=torch.uint8, device=self._device)
        targets, sources = list[torch.Tensor](), list[torch.Tensor]()
        for cut in bucket:
            piece, box = published(cut.piece), manifest.parts[self._part].pieces[cut.piece].box
            part = memory[cut.offset : cut.offset + cut.nbytes]
            targets.append(part.view(piece.dtype).view(shape_of(cut.box)))
            sources.append(piece[relative(cut.box, box)])
        torch._foreach_copy_(targets, sources)
        return memory

    def _wait_sent(self, queued: deque[torch.cuda.Event], connection: ReceiverConnection, end: float) -> None:
        """On a GPU, wait until all but the last buckets are sent, so that their memory is used again."""
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
