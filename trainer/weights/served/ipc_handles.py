"""Implements transport `ipc`: shares a trainer rank's pieces with engine ranks of its host, and sends sums.

Protocol on the connection of `trainer/weights/served/version_server.py`; the request contains the slices:

    sender -> receiver   {"gpu": UUID, "buckets": [{"memory": k, "handle": [...]}, ...], "sizes": [n, m],
                          "machine": [boot, name]}
                             with "handle" if `k` is new on this connection. The buckets contain the rank's
                             pieces at their `protocol.weights.slices.piece_places`
    receiver -> sender   {"sums": n}: the copies are queued; requests n sums. Omitted if n is 0
    sender -> receiver   n sums, raw int64: of the unread parts of partly read pieces, computed from the
                         mapped memory; from rank 0 also of pieces that no rank has read
    receiver -> sender   {"done": v}: the memory may be overwritten

Training does not wait for transfers. An engine that dies while copying only closes its connection. Versions
are double-buffered, so memory that an engine still copies is not overwritten.
"""

import itertools
from typing import Any

import torch

from protocol.device.bucket_handles import SharedBuckets, machine
from protocol.weights.slices import BucketSizes
from trainer.weights.served.channel import PartChannel
from trainer.weights.served.receiver_connection import ReceiverConnection, remaining_s
from trainer.weights.served.version_server import ServedVersion


class HandleChannel(PartChannel):
    """Channel that sends handles of one rank's pieces, and sums, to one receiver."""

    def __init__(self, memory: SharedBuckets, part: int, sizes: BucketSizes) -> None:
        """Send the pieces of rank `part` from this memory, in buckets of these sizes."""
        super().__init__(memory.device, part, sizes)
        self._memory = memory
        self._numbers = itertools.count()
        self._sent: dict[int, tuple[int, torch.Tensor]] = {}
        """Address -> (number on the wire, bucket). The reference to the bucket prevents reuse of the address.
        """

    def send(self, connection: ReceiverConnection, served: ServedVersion, end: float) -> None:
        plan = self.plan(connection, served.manifest)
        buckets = [self._bucket(bucket) for bucket in served.buckets]
        where = {"machine": machine(), "gpu": self._memory.place}
        connection.answer({**where, "buckets": buckets, "sizes": self.sizes}, end)
        if plan.rows:
            with self.on_stream():
                sums = self.sums(connection, served, plan, end).cpu()
            if connection.request(end) != {"sums": len(sums)}:
                raise ValueError(f"a receiver of version {served.manifest.version} did not ask for its sums")
            connection.send_raw(sums.numpy().tobytes(), lambda: remaining_s(end))
        connection.wait_done(served.manifest.version, end)

    def close(self) -> None:
        self._sent.clear()

    def _bucket(self, bucket: torch.Tensor) -> dict[str, Any]:
        sent = self._sent.get(bucket.data_ptr())
        if sent is not None:
            return {"memory": sent[0]}
        number = next(self._numbers)
        self._sent[bucket.data_ptr()] = (number, bucket)
        return {"memory": number, "handle": self._memory.handle(bucket)}
