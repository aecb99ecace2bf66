"""Describes the tokens of a micro-batch to the routers of its layers. No megatron here."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Rows that a rank's tokens belong to. Shapes: T tokens of this rank, S rows, N tokens of them.

    A row is a sample, or a branch of one. A token that is computed once for several rows counts in each, and
    padding in none.
    """

    places: torch.Tensor
    """int64 [N], on the device: which of this rank's tokens each token of a row is."""
    rows: torch.Tensor
    """int64 [N], on the device: which row."""
    weights: torch.Tensor
    """float32 [S], on the device: weight of a token of each row in a mean over the samples of a step of means
    over the tokens of all their rows."""
    lengths: torch.Tensor
    """float32 [S], on the device: tokens of each row over all ranks."""
    experts: torch.Tensor | None = None
    """int64 [layers with experts, T, k], on the device: the experts that every router has to choose, -1 where
    it chooses itself; None: it does everywhere."""

    def __len__(self) -> int:
        """Return S."""
        return len(self.weights)


def routed_tokens(
    lengths: Sequence[int],
    rows: torch.Tensor,
    places: torch.Tensor,
    size: int,
    samples: int,
    *,
    shares: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
    part: int = 0,
    parts: int = 1,
) -> RoutedTokens:
    """Describe this rank's part of a micro-batch, on the host.

    Args:
        lengths: tokens of each of the S rows, over all ranks.
        rows: int64 [N]: the row, from 0, of each token of a row that this context rank has.
        places: int64 [N]: which of its tokens it is.
        size: tokens that this context rank has, with padding behind.
        samples: number in the whole step; at least 1.
        shares: float32 [S]: each row's share of its sample's tokens; None: each row is a sample.
        experts: int16 [tokens without padding, layers with experts, k]: their recorded experts, if
            routers are to choose these again.
        part: number of this rank among the ranks that divide these tokens into equal pieces.
        parts: so many pieces.
    """
    whole = torch.tensor(lengths, dtype=torch.float32).clamp_min(1)
    weights = 1 / (whole * max(samples, 1))
    if shares is not None:
        weights = weights * shares
    given = None
    if experts is not None:
        filled = torch.nn.functional.pad(experts, (0, 0, 0, 0, 0, size - len(experts)), value=-1)
        given = filled.chunk(parts)[part].transpose(0, 1).long()
    first = part * (size // parts)
    mine = (places >= first) & (places < first + size // parts)
    return RoutedTokens(places[mine] - first, rows[mine], weights, whole, given)
