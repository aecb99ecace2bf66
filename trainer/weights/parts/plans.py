"""Keeps what one rank plans to send to one receiver: the same for every version, as all have one layout."""

from dataclasses import dataclass

from protocol.messages import WeightManifest
from protocol.weights.slices import (
    BucketSizes,
    Transfer,
    decode_wanted,
    rest_spans,
    transfer_of,
    untouched,
    untouched_spans,
)

Spans = list[tuple[int, int, int]]
"""(tensor, first row, after the last) of each message of sums."""


@dataclass(frozen=True, slots=True)
class SenderPlan:
    """Plan of a rank's cuts for a receiver."""

    transfer: Transfer
    rests: Spans
    """Spans of the sums of the unsent parts of partly sent pieces."""
    untouched: list[tuple[int, int]]
    """(part, index of the piece) of all ranks' pieces without a wanted element; for rank 0 alone."""
    untouched_spans: Spans
    """Spans of the sums of these."""


class SenderPlans:
    """Latest plan for the receiver of a connection."""

    def __init__(self, part: int, sizes: BucketSizes) -> None:
        """Plan what rank `part` sends, in buckets of these sizes."""
        self._part, self._sizes = part, sizes
        self._wanted: bytes | None = None
        self._plan: SenderPlan | None = None

    def plan(self, wanted: bytes, manifest: WeightManifest) -> SenderPlan:
        """Return the plan for the slices that a receiver wants of a version.

        Args:
            wanted: as it was received.
            manifest: the version; its layout is always the same.

        Raises:
            WeightError: the receiver wants a slice that does not exist.
        """
        if self._plan is None or wanted != self._wanted:
            boxes = decode_wanted(wanted, manifest)
            transfer = transfer_of(manifest, self._part, boxes, self._sizes)
            is_first = self._part == 0
            self._plan = SenderPlan(
                transfer,
                rest_spans(manifest, self._part, transfer),
                untouched(manifest, boxes) if is_first else [],
                untouched_spans(manifest, boxes) if is_first else [],
            )
            self._wanted = wanted
        return self._plan
