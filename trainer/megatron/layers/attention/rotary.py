"""Computes rotary position embeddings: once for a micro-batch, for all its layers.

Shapes: T tokens, D head size.
"""

import functools
import math
from collections.abc import Callable

import torch

from trainer.megatron.architecture.rope import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the rotary frequencies, float32 [D / 2].

    llama3 and yarn: long wavelengths are stretched by `factor`, short ones kept, those between interpolated.
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "yarn":
        keep = _kept_by_yarn(rope, head_dim)
        return (1 - keep) * frequencies / rope.factor + keep * frequencies
    if rope.type != "llama3":
        return frequencies
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _kept_by_yarn(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return the share of each frequency that stays (Peng et al. 2023, arXiv 2309.00071), float32 [D / 2].

    It falls from 1 to 0 between the dimensions that turn `beta_fast` and `beta_slow` times in the original
    context.
    """

    def dimension(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    return 1 - ((torch.arange(head_dim // 2) - low) / width).clamp(0.0, 1.0)


def rotation(
    positions: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of every angle, each [T, 1, D], for positions [T]; computed in float32."""
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys [T, heads, D] rotated by [T, 1, D]; dimension i pairs with i + D / 2.

    On a GPU one compiled kernel does each of the two directions.
    """
    return (_compiled() if query.is_cuda else _rotate)(query, key, cos, sin)


def _rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _rotated(query, cos, sin), _rotated(key, cos, sin)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@functools.cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(_rotate, dynamic=True)
