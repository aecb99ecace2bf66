"""Passes pieces of a version from its export to readers, which wait until each piece is complete."""

import threading
from collections.abc import Sequence

import torch

from trainer.weights.served.receiver_connection import ReceiverConnection, remaining_s

POLL_S = 0.05
"""Interval for checking the connection while a receiver waits for a bucket, seconds."""


class StreamedBuckets:
    """Buckets that one thread adds in order, and other threads read."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._buckets: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        """Complete buckets; a GPU bucket is complete after its event."""
        self._failed = False

    def add(self, buckets: Sequence[torch.Tensor]) -> None:
        """Add the next buckets; GPU buckets are complete after the work queued on the current stream."""
        full = None
        if any(bucket.is_cuda for bucket in buckets):
            full = torch.cuda.Event()
            full.record()
        with self._changed:
            self._buckets += [(bucket, full) for bucket in buckets]
            self._changed.notify_all()

    def fail(self) -> None:
        """Announce that no more buckets will be added; existing buckets stay readable."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def bucket(self, index: int, seconds: float) -> torch.Tensor | None:
        """Return a bucket, for work on the current stream; None if it is incomplete after `seconds`.

        Raises:
            ValueError: the bucket will not be added.
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
        """Wait until a bucket is complete, and return it as `bucket` does.

        Raises:
            ValueError: the receiver has disconnected, or the bucket will not be added.
        """
        while (bucket := self.bucket(index, min(POLL_S, remaining_s(end)))) is None:
            if connection.disconnected():
                raise ValueError("a receiver disconnected before the version was exported")
        return bucket
