"""Hands over the pieces of a version that is still being exported; readers wait until each one is full."""

import threading
from collections.abc import Sequence

import torch

from trainer.weights.served.receiver_connection import ReceiverConnection, remaining_s

POLL_S = 0.05
"""Interval at which the connection is checked while a receiver waits for a bucket."""


class StreamedBuckets:
    """Buckets that one thread adds one after the other, and other threads read."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._buckets: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        """Full buckets; those on a GPU with the event after which they are full."""
        self._failed = False

    def add(self, buckets: Sequence[torch.Tensor]) -> None:
        """Add the next buckets; on a GPU they are full once the work queued on the current stream is done."""
        full = None
        if any(bucket.is_cuda for bucket in buckets):
            full = torch.cuda.Event()
            full.record()
        with self._changed:
            self._buckets += [(bucket, full) for bucket in buckets]
            self._changed.notify_all()

    def fail(self) -> None:
        """Announce that no more buckets will be added; those that were can still be read."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def bucket(self, index: int, seconds: float) -> torch.Tensor | None:
        """Return a bucket, for work on the current stream; None if it is not full within `seconds`.

        Raises:
            ValueError: it will not be added.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failed or index < len(self._buckets), seconds)
            if index >= len(self._buckets):
                if self._failed:
                    raise ValueError("the export of the version ended before this bucket")
                return None
            bucket, full = self._buckets[index]
        if full is not None:
            full.wait()
        return bucket

    def full(self, index: int, connection: ReceiverConnection, end: float) -> torch.Tensor:
        """Wait for a bucket, as `bucket` does, until it is full.

        Raises:
            ValueError: the receiver has disconnected, or the bucket will not come.
        """
        while (bucket := self.bucket(index, min(POLL_S, remaining_s(end)))) is None:
            if connection.disconnected():
                raise ValueError("a receiver disconnected before the version was exported")
        return bucket
