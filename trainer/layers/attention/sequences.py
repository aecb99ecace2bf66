"""Describes the sequences of a micro-batch, which lie one after the other without padding.

These are stretches of sequences where several have the tokens before them in common, and with context
parallelism the pieces that this rank has.

Shapes: T tokens of S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch.nn.functional import pad

from trainer.layers.attention.segmented import AttentionSegment, segments_of
from trainer.layers.attention.terms import AttentionTerms
from trainer.layers.attention.visible import VisibleKeys, ranges, to_device


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Attention's data of a micro-batch.

    All of it is computed once, so that no layer waits for the device.
    """

    longest: int
    """Tokens of the longest sequence."""
    offsets: torch.Tensor
    """int32 [S + 1], on the device: where each sequence begins, and T."""
    segments: tuple[AttentionSegment, ...] = ()
    """For attention by segments, of the keys; empty if another implementation is used."""
    keys: VisibleKeys | None = None
    """The keys that sequences see, if they are stretches or pieces of longer ones. None: each has as many
    keys as queries, its own."""
    copied: Self | None = None
    """Data for layers whose pieces do not attend apart to keys before them; None: all layers have one."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        *,
        segmented: bool,
        keys: Sequence[VisibleKeys] = (),
        **more: Any,
    ) -> Self:
        """Describe sequences, each a sample without its last token, for a device.

        Args:
            lengths: tokens of each sequence, at least 1; attention by segments is fast if similar lengths
                are neighbours.
            device: where attention is computed.
            segmented: whether attention goes by segments.
            keys: keys that the sequences see, on the host, if they are pieces of longer ones; then those for
                layers that do not attend to keys apart, if there are both kinds.
            more: fields that a subclass adds.
        """
        offsets = to_device(pad(torch.tensor(lengths).cumsum(0), (1, 0)).int(), device)
        plain = cls(max(lengths), offsets, **more)
        first, *others = [plain._with_keys(one, lengths, segmented=segmented) for one in keys or (None,)]
        return replace(first, copied=others[0]) if others else first

    def _with_keys(self, keys: VisibleKeys | None, lengths: Sequence[int], *, segmented: bool) -> Self:
        device = self.offsets.device
        seen = lengths if keys is None else keys.offsets.diff().tolist()
        return replace(
            self,
            segments=segments_of(seen, device) if segmented else (),
            keys=None if keys is None else keys.to(device),
        )

    def for_layer(self, terms: AttentionTerms) -> Self:
        """Return the data of a layer."""
        return self if self.copied is None or terms.joins else self.copied

    @property
    def key_offsets(self) -> torch.Tensor:
        """int32 [S + 1], on the device: where the keys of each sequence begin, and their number."""
        return self.offsets if self.keys is None else self.keys.offsets

    @property
    def longest_keys(self) -> int:
        """Keys of the sequence with the most."""
        return self.longest if self.keys is None else self.keys.longest


def token_positions(lengths: Sequence[int], keys: VisibleKeys | None) -> torch.Tensor:
    """Return the position of each token in its whole sequence, int64 [T], on the host.

    `lengths` are of the sequences, and `keys` are those that they see, as for `PackedSequences.of`.
    """
    sizes = torch.tensor(lengths)
    starts = torch.zeros_like(sizes) if keys is None else keys.starts
    return ranges(starts, sizes)
