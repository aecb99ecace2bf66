"""Describes the sequences of a micro-batch, which lie one after the other without padding.

These are stretches of sequences where several have the tokens before them in common, and with context
parallelism the pieces that this rank has.

Shapes: T tokens of S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainer.megatron.layers.attention.rotary import Angles, Rotary
from trainer.megatron.layers.attention.rows import to_device
from trainer.megatron.layers.attention.segmented import AttentionSegment, segments_of
from trainer.megatron.layers.attention.terms import AttentionTerms
from trainer.megatron.layers.attention.visible import VisibleKeys
from trainer.megatron.layers.experts.tokens import RoutedTokens


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """Attention's data of a micro-batch; megatron hands it to every layer as `packed_seq_params`.

    All of it is computed once, so that no layer waits for the device.
    """

    longest: int
    """Tokens of the longest sequence."""
    offsets: torch.Tensor
    """int32 [S + 1], on the device: where each sequence begins, and T."""
    angles: tuple[Angles, ...]
    """Angles of the tokens, for each rotary embedding of the model; positions are from 0 in every whole
    sequence."""
    segments: tuple[AttentionSegment, ...] = ()
    """For attention by segments, of the keys; empty if another implementation is used."""
    copied: "PackedSequences | None" = None
    """Data for layers whose pieces do not attend apart to keys before them; None: all layers have one."""
    routed: RoutedTokens | None = None
    """What routers have to know of the tokens; None where no layer has experts."""
    keys: VisibleKeys | None = None
    """The keys that sequences see, if they are stretches or pieces of longer ones. None: each has as many
    keys as queries, its own."""
    qkv_format: str = "thd"
    """megatron's name of the packed format: it drops the dimension of the batch before attention."""

    def for_layer(self, terms: AttentionTerms) -> "PackedSequences":
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


def packed_sequences(
    lengths: Sequence[int],
    rotaries: Sequence[Rotary],
    dtype: torch.dtype,
    keys: Sequence[VisibleKeys] = (),
    *,
    segmented: bool,
) -> PackedSequences:
    """Describe sequences, each a sample without its last token, for the device of the rotary embeddings.

    Args:
        lengths: tokens of each sequence, at least 1; attention by segments is fast if similar lengths are
            neighbours.
        rotaries: the model's.
        dtype: the queries' and keys'.
        keys: keys that the sequences see, on the host, if they are pieces of longer ones; then those for
            layers that do not attend to keys apart, if there are both kinds.
        segmented: whether attention goes by segments.
    """
    device = rotaries[0].frequencies.device
    sizes = torch.tensor(lengths)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    starts, whole = (keys[0].starts, keys[0].whole) if keys else (torch.zeros_like(sizes), sizes)
    positions = torch.arange(int(offsets[-1])) + (starts - offsets[:-1]).repeat_interleave(sizes)
    places = to_device(positions, device)
    samples = to_device((whole + 1).repeat_interleave(sizes), device)
    found = PackedSequences(
        max(lengths),
        to_device(offsets.int(), device),
        tuple(rotary.angles(places, samples, dtype) for rotary in rotaries),
    )
    first, *others = [_with_keys(found, one, lengths, segmented=segmented) for one in keys or (None,)]
    return replace(first, copied=others[0]) if others else first


def _with_keys(
    sequences: PackedSequences, keys: VisibleKeys | None, lengths: Sequence[int], *, segmented: bool
) -> PackedSequences:
    device = sequences.offsets.device
    seen = lengths if keys is None else keys.offsets.diff().tolist()
    return replace(
        sequences,
        segments=segments_of(seen, device) if segmented else (),
        keys=None if keys is None else keys.to(device),
    )
