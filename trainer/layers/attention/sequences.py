"""Describes the sequences of a micro-batch, which lie one after the other without padding.

These are stretches of sequences where several have the tokens before them in common, and with context
parallelism the pieces that this rank has.

Shapes: T tokens of S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn.functional import pad

from trainer.layers.attention.segmented import AttentionSegment, segments_of
from trainer.layers.attention.visible import VisibleKeys, to_device


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

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        *,
        segmented: bool,
        keys: VisibleKeys | None = None,
        **more: Any,
    ) -> Self:
        """Describe sequences, each a sample without its last token, for a device.

        Args:
            lengths: tokens of each sequence, at least 1; attention by segments is fast if similar lengths
                are neighbours.
            device: where attention is computed.
            segmented: whether attention goes by segments.
            keys: keys that the sequences see, on the host, if they are pieces of longer ones.
            more: fields that a subclass adds.
        """
        return cls(
            max(lengths),
            to_device(pad(torch.tensor(lengths).cumsum(0), (1, 0)).int(), device),
            segments_of(_seen(lengths, keys).tolist(), device) if segmented else (),
            None if keys is None else keys.to(device),
            **more,
        )

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

    The arguments are those of `PackedSequences.of`.
    """
    sizes = torch.tensor(lengths)
    behind = _seen(lengths, keys) - sizes.cumsum(0)
    return torch.arange(int(sizes.sum())) + behind.repeat_interleave(sizes)


def _seen(lengths: Sequence[int], keys: VisibleKeys | None) -> torch.Tensor:
    """Return the keys that each sequence sees, int64 [S], on the host."""
    return torch.tensor(lengths) if keys is None else keys.offsets.diff().long()
