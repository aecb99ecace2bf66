"""Lets one engine rank map one trainer rank's pieces of a version, on the same host, and sends it sums.

The dialogue is that of `trainer/weights/ipc.py`, with the slices that the receiver wants in the request:

    sender -> receiver   the answer also has {"bucket_bytes": n}. The buckets hold the rank's pieces, at their
                         `protocol.weights.slices.piece_places`
    receiver -> sender   {"sums": n}: it has queued its copies and wants n sums, if there are any
    sender -> receiver   the sums of the rest of the pieces that are read in part, computed from what is
                         mapped; from rank 0 also those of the pieces that no rank has anything read of.
                         int64, n of them, without a line
    receiver -> sender   {"done": v}
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from protocol.device.bucket_handles import SharedBuckets
from trainer.weights.ipc import HandleChannel
from trainer.weights.nccl import full_bucket
from trainer.weights.parts.plans import SenderPlan, SenderPlans
from trainer.weights.parts.sums import rest_sums, untouched_sums
from trainer.weights.receiver_connection import ReceiverConnection
from trainer.weights.version_server import ServedVersion


class PartHandleChannel(HandleChannel):
    """Sends handles of one rank's pieces, and sums, to one receiver."""

    def __init__(self, memory: SharedBuckets, *, part: int, bucket_bytes: int) -> None:
        """Send what rank `part` has in this memory, in buckets of this size."""
        super().__init__(memory)
        self._part = part
        self._bucket_bytes = bucket_bytes
        self._plans = SenderPlans(part, bucket_bytes)
        self._stream: torch.cuda.Stream | None = None
        """Stream of all versions: torch keeps freed memory for the stream on which it was allocated."""

    def send(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        plan = self._plans.plan(connection.wanted, served.manifest)
        with self._on_stream():
            connection.answer(self.described(served) | {"bucket_bytes": self._bucket_bytes}, end)
            sums = self._sums(connection, served, plan, end)
        if len(sums):
            if connection.request(end) != {"sums": len(sums)}:
                raise ValueError(f"a receiver of version {served.manifest.version} did not ask for its sums")
            connection.send(sums.numpy().tobytes(), end)
        connection.wait_done(served.manifest.version, end)

    def _sums(
        self, connection: ReceiverConnection, served: ServedVersion, plan: SenderPlan, end: float
    ) -> torch.Tensor:
        """Return all that is sent, int64 on the CPU."""

        def published(number: int) -> torch.Tensor:
            return full_bucket(connection, served.streamed, number, end)

        def collected(number: int) -> torch.Tensor:
            return full_bucket(connection, served.collected, number, end)

        rest = rest_sums(served.manifest, self._part, plan, published, self._memory.device)
        return torch.cat([rest.cpu(), untouched_sums(served.manifest, plan, collected)])

    def _on_stream(self) -> AbstractContextManager[object]:
        """Return a context for work on the GPU, beside that of the trainer."""
        device = self._memory.device
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream)
