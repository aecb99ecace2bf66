"""Describes the sequences of a micro-batch, which lie one after the other without padding.

These are stretches of sequences where several have the tokens before them in common, and with context
parallelism the pieces that this rank has.

Shapes: T tokens of S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.megatron.layers.attention.rotary import Angles, Rotary
from trainer.megatron.layers.attention.segmented import AttentionSegment, segments_of
from trainer.megatron.layers.attention.visible import VisibleKeys, to_device
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
    routed: RoutedTokens | None = None
    """What routers have to know of the tokens; None where no layer has experts."""
    keys: VisibleKeys | None = None
    """The keys that sequences see, if they are stretches or pieces of longer ones. None: each has as many
    keys as queries, its own."""
    qkv_format: str = "thd"
    """megatron's name of the packed format: it drops the dimension of the batch before attention."""

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
    *,
    segmented: bool,
    keys: VisibleKeys | None = None,
) -> PackedSequences:
    """Describe sequences, each a sample without its last token, for the device of the rotary embeddings.

    Args:
        lengths: tokens of each sequence, at least 1; attention by segments is fast if similar lengths are
            neighbours.
        rotaries: the model's.
        dtype: the queries' and keys'.
        segmented: whether attention goes by segments.
        keys: keys that the sequences see, on the host, if they are pieces of longer ones.
    """
    device = rotaries[0].frequencies.device
    sizes = torch.tensor(lengths)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    seen = sizes if keys is None else keys.offsets.diff().long()
    positions = torch.arange(int(offsets[-1])) + (seen - sizes - offsets[:-1]).repeat_interleave(sizes)
    places = to_device(positions, device)
    whole = sizes if keys is None else keys.whole
    samples = to_device((whole + 1).repeat_interleave(sizes), device)
    return PackedSequences(
        max(lengths),
        to_device(offsets.int(), device),
        tuple(rotary.angles(places, samples, dtype) for rotary in rotaries),
        segments_of(seen.tolist(), device) if segmented else (),
        keys=None if keys is None else keys.to(device),
    )
