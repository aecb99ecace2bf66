"""Defines the transfer of a version from a trainer rank to this engine rank, and its channel."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from protocol.host.line_connection import TimedLine
from protocol.messages import WeightManifest
from protocol.weights.slices import BucketSizes, Cut, Transfer
from rollout.weights.base import Destination
from rollout.weights.verification import Deadline

MAX_BUCKETS_IN_FLIGHT = 4
"""Number of buckets in flight."""


class PartTransfer(NamedTuple):
    """Transfer of a version from one trainer rank to this engine rank."""

    manifest: WeightManifest
    """Manifest with the location of the trainer rank."""
    part: int
    answer: dict[str, Any]
    """The trainer rank's answer to the request."""
    plan: Transfer
    deadline: Deadline
    disconnected: Callable[[], bool]
    """Returns whether the trainer rank has disconnected or the receiver was closed."""
    line: TimedLine
    place: Destination


def memory_of(bucket: tuple[Cut, ...], transfer: PartTransfer, device: torch.device) -> torch.Tensor:
    """Return memory for a bucket, uint8: the dense destination of its only cut, or new memory."""
    if len(bucket) == 1:
        (cut,) = bucket
        target = transfer.place(transfer.manifest.tensors[cut.tensor].name, cut.box)
        if target is not None and target.device == device and target.is_contiguous():
            return target.view(-1).view(torch.uint8)
    return torch.empty(Transfer.nbytes(bucket), dtype=torch.uint8, device=device)


class ReceiverChannel(Protocol):
    """Channel that transfers slices over a connection to one trainer rank."""

    def address(self, manifest: WeightManifest) -> tuple[str, int]:
        """Return host and port of the trainer rank.

        Raises:
            WeightError: the location contains no address, or this engine cannot use the transport.
        """

    def sizes(self, answer: dict[str, Any]) -> BucketSizes:
        """Return the bucket sizes for the trainer rank's cuts, from its answer."""

    def slices(self, transfer: PartTransfer) -> Iterator[Iterable[tuple[Cut, torch.Tensor]]]:
        """Yield every cut of the plan with its elements, in batches that are valid until the next batch."""

    def sums(self, transfer: PartTransfer, count: int) -> torch.Tensor:
        """Return the sums sent after the slices: int64 [count], on the device of the slices."""

    def drain_device(self) -> None:
        """Wait until no queued work uses the trainer rank's memory or a destination, before a disconnect."""

    def interrupt(self) -> None:
        """Wake a thread that waits for bytes of a disconnected rank. Called with the lock held."""

    def release(self) -> None:
        """Release the connection's resources. Called with the lock held, possibly more than once."""
