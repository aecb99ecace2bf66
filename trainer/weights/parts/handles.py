"""Lets one engine rank map one trainer rank's pieces of a version, on the same host, and sends it sums.

The dialogue, on the connection of `trainer/weights/version_server.py`, with the slices that the receiver
wants in its request:

    sender -> receiver   {"gpu": UUID, "buckets": [{"memory": k, "handle": [...]}, ...], "sizes": [n, m]}
                             a handle where `k` is new on this connection. The buckets hold the rank's pieces,
                             at their `protocol.weights.slices.piece_places`
    receiver -> sender   {"sums": n}: it has queued its copies and wants n sums, if there are any
    sender -> receiver   the sums of the rest of the pieces that are read in part, computed from the mapped
                         memory; from rank 0 also the sums of pieces that no rank has read.
                         int64, n of them, without a line
    receiver -> sender   {"done": v}: the memory may be written again

The trainer neither computes nor waits, and an engine that dies while it copies is merely a closed connection.
Versions are double-buffered: none is written over one that an engine still copies.
"""

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from protocol.device.bucket_handles import SharedBuckets
from protocol.weights.buckets import ALONE_ON_GPU_BYTES
from protocol.weights.slices import BucketSizes
from trainer.weights.parts.plans import SenderPlan, SenderPlans
from trainer.weights.parts.sums import rest_sums, untouched_sums
from trainer.weights.receiver_connection import ReceiverConnection
from trainer.weights.streamed_buckets import full_bucket
from trainer.weights.version_server import ServedVersion


class PartHandleChannel:
    """Sends handles of one rank's pieces, and sums, to one receiver."""

    def __init__(self, memory: SharedBuckets, *, part: int, bucket_bytes: int) -> None:
        """Send what rank `part` has in this memory, in buckets of this size."""
        self._memory = memory
        self._numbers = itertools.count()
        self._sent: dict[int, tuple[int, torch.Tensor]] = {}
        """Address -> (number on the wire, bucket). The reference keeps the address from being reused."""
        self._part = part
        self._sizes = BucketSizes(bucket_bytes, min(bucket_bytes, ALONE_ON_GPU_BYTES))
        self._plans = SenderPlans(part, self._sizes)
        self._stream: torch.cuda.Stream | None = None
        """Stream of all versions: torch keeps freed memory for the stream on which it was allocated."""

    def send(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        plan = self._plans.plan(connection.wanted, served.manifest)
        with self._on_stream():
            connection.answer(self._described(served) | {"sizes": self._sizes}, end)
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
        """Return a context for work on the GPU, on a stream other than the trainer's."""
        device = self._memory.device
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream)

    def close(self) -> None:
        self._sent.clear()

    def _described(self, served: ServedVersion) -> dict[str, Any]:
        """Return the answer that describes the buckets of a version."""
        return {"gpu": self._memory.place, "buckets": [self._bucket(bucket) for bucket in served.buckets]}

    def _bucket(self, bucket: torch.Tensor) -> dict[str, Any]:
        sent = self._sent.get(bucket.data_ptr())
        if sent is not None:
            return {"memory": sent[0]}
        number = next(self._numbers)
        self._sent[bucket.data_ptr()] = (number, bucket)
        return {"memory": number, "handle": self._memory.handle(bucket)}
