"""Describes the sequences of a micro-batch with what Megatron's layers need besides attention.

Shapes: T tokens of S sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.layers.attention.sequences import PackedSequences, token_positions
from trainer.layers.attention.visible import VisibleKeys, to_device
from trainer.megatron.layers.attention.rotary import Angles, Rotary
from trainer.megatron.layers.experts.balance import RoutedTokens


@dataclass(frozen=True, slots=True)
class RotarySequences(PackedSequences):
    """Sequences and the angles of their tokens; megatron hands it to every layer as `packed_seq_params`."""

    angles: tuple[Angles, ...] = ()
    """Angles of the tokens, for each rotary embedding of the model; positions are from 0 in every whole
    sequence."""
    routed: RoutedTokens | None = None
    """What routers have to know of the tokens; None where no layer has experts."""
    qkv_format: str = "thd"
    """megatron's name of the packed format: it drops the dimension of the batch before attention."""


def packed_sequences(
    lengths: Sequence[int],
    rotaries: Sequence[Rotary],
    dtype: torch.dtype,
    keys: Sequence[VisibleKeys] = (),
    *,
    segmented: bool,
) -> RotarySequences:
    """Describe sequences for the device of the rotary embeddings; see `PackedSequences.of`.

    Args:
        lengths: tokens of each sequence.
        rotaries: the model's.
        dtype: the queries' and keys'.
        keys: keys that the sequences see, on the host, if they are pieces of longer ones; then those for
            layers that do not attend to keys apart, if there are both kinds.
        segmented: whether attention goes by segments.
    """
    device = rotaries[0].frequencies.device
    sizes = torch.tensor(lengths)
    first = keys[0] if keys else None
    places = to_device(token_positions(lengths, first), device)
    whole = sizes if first is None else first.whole
    samples = to_device((whole + 1).repeat_interleave(sizes), device)
    angles = tuple(rotary.angles(places, samples, dtype) for rotary in rotaries)
    return RotarySequences.of(lengths, device, segmented=segmented, keys=keys, angles=angles)
