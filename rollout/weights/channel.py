"""One trainer rank's part of the transfer of a version to this engine rank, and how its bytes get here."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from protocol.host.line_connection import TimedLine
from protocol.messages import WeightManifest
from protocol.weights.slices import BucketSizes, Cut, Transfer
from rollout.weights.base import Destination
from rollout.weights.verification import Deadline

AHEAD = 4
"""Buckets in flight at a time."""


class PartTransfer(NamedTuple):
    """One trainer rank's part of the transfer of a version to this engine rank."""

    manifest: WeightManifest
    """With the location of that rank."""
    part: int
    answer: dict[str, Any]
    """The rank's answer to the request."""
    plan: Transfer
    deadline: Deadline
    disconnected: Callable[[], bool]
    """Returns whether the rank has disconnected or the receiver was closed."""
    line: TimedLine
    place: Destination


def memory_of(bucket: tuple[Cut, ...], transfer: PartTransfer, device: torch.device) -> torch.Tensor:
    """Return where a bucket goes, uint8: the dense destination of its only cut, or new memory."""
    if len(bucket) == 1:
        (cut,) = bucket
        target = transfer.place(transfer.manifest.tensors[cut.tensor].name, cut.box)
        if target is not None and target.device == device and target.is_contiguous():
            return target.view(-1).view(torch.uint8)
    return torch.empty(Transfer.nbytes(bucket), dtype=torch.uint8, device=device)


class ReceiverChannel(Protocol):
    """Channel that transfers slices over a connection to one trainer rank."""

    def address(self, manifest: WeightManifest) -> tuple[str, int]:
        """Return host and port of the rank.

        Raises:
            WeightError: the location contains none, or this engine cannot use the transport.
        """

    def sizes(self, answer: dict[str, Any]) -> BucketSizes:
        """Return the sizes of the buckets in which the rank's cuts are received, by its answer."""

    def slices(self, transfer: PartTransfer) -> Iterator[Iterable[tuple[Cut, torch.Tensor]]]:
        """Yield every cut of the plan with its elements, in its shape: many at a time, until the next."""

    def sums(self, transfer: PartTransfer, count: int) -> torch.Tensor:
        """Return the sums that the rank sends behind the slices: int64 [count], where the slices were."""

    def drain_device(self) -> None:
        """Wait until no queued work touches the rank's memory or a destination, before a disconnect."""

    def interrupt(self) -> None:
        """Wake a thread that waits for the bytes of a rank that disconnected. Called with the lock held."""

    def release(self) -> None:
        """Release what belongs to the connection. Called with the lock held, possibly more than once."""
