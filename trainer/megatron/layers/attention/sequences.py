"""Describes the sequences of a micro-batch, which lie one after the other without padding.

Shapes: T tokens of S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.megatron.layers.attention.rotary import Angles, Rotary
from trainer.megatron.layers.attention.segmented import AttentionSegment, segments_of
from trainer.megatron.layers.experts.tokens import RoutedTokens


@dataclass(frozen=True, slots=True)
class PackedSequences:
    """What attention has to know of a micro-batch; megatron hands it to every layer as `packed_seq_params`.

    All of it is computed once, so that no layer waits for the device.
    """

    longest: int
    """Tokens of the longest sequence."""
    offsets: torch.Tensor
    """int32 [S + 1], on the device: where each sequence begins, and T."""
    angles: tuple[Angles, ...]
    """Angles of the tokens, for each rotary embedding of the model."""
    segments: tuple[AttentionSegment, ...] = ()
    """For attention by segments; empty if another implementation is used."""
    routed: RoutedTokens | None = None
    """What routers have to know of the tokens; None where no layer has experts."""
    qkv_format: str = "thd"
    """megatron's name of the packed format: it drops the dimension of the batch before attention."""


def packed_sequences(
    lengths: Sequence[int],
    rotaries: Sequence[Rotary],
    dtype: torch.dtype,
    *,
    segmented: bool,
) -> PackedSequences:
    """Describe sequences, each a sample without its last token, for the device of the rotary embeddings.

    Args:
        lengths: tokens of each sequence, at least 1; attention by segments is fast if similar lengths are
            neighbours.
        rotaries: the model's.
        dtype: that of queries and keys.
        segmented: whether attention goes by segments.
    """
    device = rotaries[0].frequencies.device
    sizes = torch.tensor(lengths)
    offsets = torch.nn.functional.pad(sizes.cumsum(0), (1, 0))
    positions = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(sizes)
    places = to_device(positions, device)
    samples = to_device((sizes + 1).repeat_interleave(sizes), device)
    return PackedSequences(
        max(lengths),
        to_device(offsets.int(), device),
        tuple(rotary.angles(places, samples, dtype) for rotary in rotaries),
        segments_of(lengths, device) if segmented else (),
    )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to a device without waiting for it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
