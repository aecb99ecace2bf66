"""The buckets of a version that is being made, for senders that begin before the last of them is full."""

import threading

import torch


class StreamedBuckets:
    """Buckets come one after the other, from one thread, and are read by others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._buckets: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._failed = False

    def add(self, bucket: torch.Tensor) -> None:
        """The next bucket is full; on a GPU when what is queued on the current stream by now is done."""
        full = None
        if bucket.is_cuda:
            full = torch.cuda.Event()
            full.record()
        with self._changed:
            self._buckets.append((bucket, full))
            self._changed.notify_all()

    def fail(self) -> None:
        """No more buckets will come: those that have stay."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def bucket(self, index: int, seconds: float) -> torch.Tensor | None:
        """A bucket, for work on the current stream; None if it is not there within `seconds`.

        Raises:
            ValueError: it will not come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failed or index < len(self._buckets), seconds)
            if index >= len(self._buckets):
                if self._failed:
                    raise ValueError("the version was given up before it was complete")
                return None
            bucket, full = self._buckets[index]
        if full is not None:
            full.wait()
        return bucket
