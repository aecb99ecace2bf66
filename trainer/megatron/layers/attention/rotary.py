"""Computes rotary position embeddings once per micro-batch, as part of its packed-sequence metadata.

Shapes: T tokens, D head size, R rotated dimensions of a head.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trainer.layers.attention.sequences import PackedSequences, token_positions
from trainer.layers.attention.visible import VisibleKeys, to_device
from trainer.megatron.families.rope import Rope
from trainer.megatron.layers.experts.balance import RoutedTokens


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosine and sine of the rotation angles of tokens."""

    cos: torch.Tensor
    """[..., 1, R], on the device: cosines for each token's position, from 0 in every sequence."""
    sin: torch.Tensor
    """Shaped as `cos`. Negative for the first dimension of each pair, from which the second is subtracted."""
    interleaved: bool = False
    """See `Rotary`."""

    def rotate(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rotated queries and keys [..., heads, D]. Only the first R dimensions change.

        On a GPU, one compiled kernel each for forward and backward supports any number of tokens.
        """
        if not query.is_cuda:
            return _rotate(query, key, self.cos, self.sin, self.interleaved)
        for tensor in (query, key, self.cos, self.sin):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return _compiled()(query, key, self.cos, self.sin, self.interleaved)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding on a device."""

    frequencies: torch.Tensor
    """float32 [R / 2]."""
    long: torch.Tensor | None = None
    """longrope: frequencies of sequences longer than `original`."""
    original: int = 0
    factor: float = 1.0
    """Factor of the rotated vectors; 1 if it is part of the scale of the scores."""
    interleaved: bool = False
    """Whether dimension 2 i is paired with 2 i + 1; otherwise i with i + R / 2."""

    @classmethod
    def of(cls, rope: Rope, head_dim: int, device: torch.device) -> "Rotary":
        """Compute the frequencies."""
        dimensions = rope.dimensions(head_dim)
        short = inverse_frequencies(rope, dimensions).to(device)
        long = inverse_frequencies(rope, dimensions, long=True).to(device) if rope.long_factor else None
        factor = rope.attention_factor if dimensions < head_dim else 1.0
        return cls(short, long, rope.original_max_position_embeddings, factor, rope.interleaved)

    def angles(self, positions: torch.Tensor, lengths: torch.Tensor, dtype: torch.dtype) -> Angles:
        """Return cosine and sine, each [T, 1, R], computed in float32.

        Args:
            positions: integers [T], on the device.
            lengths: integers [T], on the device: length of each token's sequence.
            dtype: dtype of queries and keys.
        """
        cos, sin = rotation(positions, self.frequencies, torch.float32)
        if self.long is not None:
            is_long = (lengths > self.original)[:, None, None]
            longer = rotation(positions, self.long, torch.float32)
            cos, sin = (torch.where(is_long, x, y) for x, y in zip(longer, (cos, sin), strict=True))
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        dim = _pair_dim(self.interleaved)
        cos, sin = (torch.stack(pair, dim).flatten(-2).to(dtype) for pair in ((cos, cos), (-sin, sin)))
        return Angles(cos, sin, self.interleaved)

    def halves(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine of each angle once, float32 [T, R / 2]; sequences end at `positions`."""
        found = self.angles(positions, positions + 1, torch.float32)
        each = slice(None, None, 2) if self.interleaved else slice(len(self.frequencies))
        return found.cos[:, 0, each], -found.sin[:, 0, each]


def inverse_frequencies(rope: Rope, dimensions: int, *, long: bool = False) -> torch.Tensor:
    """Return the rotary frequencies, float32 [R / 2].

    llama3 and yarn: long wavelengths are stretched by `factor`, short ones kept, and wavelengths between are
    interpolated. longrope: each frequency is divided by its own factor; `long` sequences have other factors.
    """
    exponents = torch.arange(0, dimensions, 2, dtype=torch.int64).float() / dimensions
    frequencies = 1.0 / rope.theta**exponents
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "yarn":
        keep = _kept_by_yarn(rope, dimensions)
        return (1 - keep) * frequencies / rope.factor + keep * frequencies
    if rope.type == "longrope":
        factors = torch.tensor(rope.long_factor if long else rope.short_factor)
        return 1.0 / (factors * rope.theta**exponents)
    if rope.type != "llama3":
        return frequencies
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _kept_by_yarn(rope: Rope, dimensions: int) -> torch.Tensor:
    """Return the weight of each original frequency (Peng et al. 2023, arXiv 2309.00071), float32 [R / 2].

    The weight falls from 1 to 0 between the dimensions that rotate `beta_fast` and `beta_slow` times within
    the original context.
    """

    def dimension(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / turns
        return dimensions * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dimensions - 1)
    width = high - low or 0.001
    return 1 - ((torch.arange(dimensions // 2) - low) / width).clamp(0.0, 1.0)


def rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of every angle, each [T, 1, R / 2], for positions [T]; computed in float32."""
    angles = torch.outer(positions.float(), frequencies)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _pair_dim(interleaved: bool) -> int:
    """Return the pair dimension after R is unflattened into pairs."""
    return -1 if interleaved else -2


def _rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotated(query, cos, sin, interleaved), _rotated(key, cos, sin, interleaved)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    dimensions = cos.size(-1)
    turned, rest = x[..., :dimensions], x[..., dimensions:]
    # a flip and signs in the sine, because the compiled kernel would read concatenated halves twice
    pairs = turned.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    partners = pairs.flip(_pair_dim(interleaved)).flatten(-2)
    turned = turned * cos + partners * sin
    return torch.cat((turned, rest), dim=-1) if rest.size(-1) else turned


@functools.cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(_rotate)


@dataclass(frozen=True, slots=True)
class RotarySequences(PackedSequences):
    """Packed sequences with rotation angles; megatron passes them to every layer as `packed_seq_params`."""

    angles: tuple[Angles, ...] = ()
    """Angles of the tokens per rotary embedding of the model. Positions start at 0 in every whole
    sequence."""
    routed: RoutedTokens | None = None
    """Token metadata for routers; None without experts."""
    qkv_format: str = "thd"
    """megatron's name of the packed format, for which megatron drops the batch dimension before attention."""


def packed_sequences(
    lengths: Sequence[int],
    rotaries: Sequence[Rotary],
    dtype: torch.dtype,
    keys: Sequence[VisibleKeys] = (),
    *,
    segmented: bool,
) -> RotarySequences:
    """Describe sequences on the device of the rotary embeddings; see `PackedSequences.of`.

    Args:
        lengths: tokens of each sequence.
        rotaries: rotary embeddings of the model.
        dtype: dtype of queries and keys.
        keys: visible keys, on the host, if the sequences are pieces of longer sequences. With two kinds of
            layers, the second entry is for layers that copy keys.
        segmented: whether attention runs by segments.
    """
    device = rotaries[0].frequencies.device
    sizes = torch.tensor(lengths)
    first = keys[0] if keys else None
    places = to_device(token_positions(lengths, first), device)
    whole = sizes if first is None else first.whole
    samples = to_device((whole + 1).repeat_interleave(sizes), device)
    angles = tuple(rotary.angles(places, samples, dtype) for rotary in rotaries)
    return RotarySequences.of(lengths, device, segmented=segmented, keys=keys, angles=angles)
