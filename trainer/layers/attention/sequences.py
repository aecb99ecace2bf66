"""Describes the packed, unpadded sequences of a micro-batch.

With shared prefixes, the sequences are stretches of samples. With context parallelism, the sequences are the
pieces on this rank.

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
    """Attention metadata of a micro-batch.

    Computed once per micro-batch, so no layer synchronizes with the device.
    """

    longest: int
    """Number of tokens of the longest sequence."""
    offsets: torch.Tensor
    """int32 [S + 1], on the device: start of each sequence, and T."""
    segments: tuple[AttentionSegment, ...] = ()
    """Segments of the keys, for attention by segments; otherwise empty."""
    keys: VisibleKeys | None = None
    """Visible keys, if sequences are stretches or pieces of longer sequences. None: each sequence sees only
    its own tokens."""
    copied: Self | None = None
    """Metadata for layers that copy the keys before a piece instead of attending to them separately; None:
    all layers use the same metadata."""

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
        """Describe sequences for a device. Each sequence is a sample without its last token.

        Args:
            lengths: tokens of each sequence, at least 1. Attention by segments is fastest if neighbours have
                similar lengths.
            device: device of the attention.
            segmented: whether attention runs by segments.
            keys: visible keys, on the host, if the sequences are pieces of longer sequences. With two kinds
                of layers, the second entry is for layers that copy keys.
            more: fields of a subclass.
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
        """Return the metadata for a layer with these terms."""
        return self if self.copied is None or terms.joins else self.copied

    @property
    def key_offsets(self) -> torch.Tensor:
        """int32 [S + 1], on the device: start of each sequence's keys, and the number of keys."""
        return self.offsets if self.keys is None else self.keys.offsets

    @property
    def longest_keys(self) -> int:
        """Number of keys of the sequence with the most keys."""
        return self.longest if self.keys is None else self.keys.longest


def token_positions(lengths: Sequence[int], keys: VisibleKeys | None) -> torch.Tensor:
    """Return the position of each token in its whole sequence, int64 [T], on the host.

    `lengths` and `keys` are arguments of `PackedSequences.of`.
    """
    sizes = torch.tensor(lengths)
    starts = torch.zeros_like(sizes) if keys is None else keys.starts
    return ranges(starts, sizes)
