"""Keeps what an engine rank plans to receive: it is the same for every version of one layout.

Planning takes tens of milliseconds of Python's time for a model of some hundred tensors, which an engine's
steps need.
"""

from protocol.messages import WeightManifest
from protocol.weights.buckets import layout_digest
from protocol.weights.slices import (
    BucketSizes,
    Transfer,
    Wanted,
    encode_wanted,
    rest_spans,
    senders_of,
    transfer_of,
    untouched_spans,
)

Spans = list[tuple[int, int, int]]
"""(tensor, first row, after the last) of each message of sums."""


class ReceiverPlans:
    """Plans for the versions of one layout, made when they are needed and kept until the layout changes."""

    def __init__(self) -> None:
        self.encoded = b""
        """The wanted slices, encoded."""
        self.senders: list[int] = []
        """The ranks to ask, see `senders_of`."""
        self._wanted: Wanted = {}
        self._layout = 0
        self._by_part: dict[tuple[int, BucketSizes], tuple[Transfer, Spans]] = {}
        """(part, sizes of its buckets) -> plan."""

    def use(self, manifest: WeightManifest, wanted: Wanted) -> None:
        """Plan to receive `wanted` of versions like this one."""
        layout, encoded = layout_digest(manifest), encode_wanted(wanted)
        if (layout, encoded) == (self._layout, self.encoded):
            return
        self.encoded, self._layout, self._wanted = encoded, layout, wanted
        self.senders = senders_of(manifest, wanted)
        self._by_part = {}

    def slices_from(self, manifest: WeightManifest, part: int, sizes: BucketSizes) -> tuple[Transfer, Spans]:
        """Return what rank `part` sends, and the spans of the sums that follow it."""
        if (part, sizes) not in self._by_part:
            plan = transfer_of(manifest, part, self._wanted, sizes)
            spans = rest_spans(manifest, part, plan)
            spans += untouched_spans(manifest, self._wanted) if part == 0 else []
            self._by_part[part, sizes] = plan, spans
        return self._by_part[part, sizes]
