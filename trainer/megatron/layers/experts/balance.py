"""Describes a micro-batch's tokens to routers, and keeps a step's tokens spread over the experts.

Shapes: T tokens of this rank, S rows of the micro-batch (samples, or branches of them), E experts of the
layer, k of them for a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from protocol.errors import SettingsError
from trainer.config import TrainerConfig
from trainer.megatron.families.experts import Experts


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


def set_balance(config: Any, experts: Experts, trainer: TrainerConfig) -> None:
    """Set the coefficients in megatron's `config`, from which routers take them.

    Raises:
        SettingsError: the model has no experts that could be balanced so.
    """
    if trainer.moe_router_bias_update_rate and not experts.bias:
        raise SettingsError(
            f"setting trainer.moe_router_bias_update_rate: {trainer.moe_router_bias_update_rate:g} is for "
            "models whose routers have biases that checkpoints hold, and this one's have none: set it to 0, "
            "or use trainer.moe_aux_loss_coeff"
        )
    config.moe_aux_loss_coeff = trainer.moe_aux_loss_coeff
    config.moe_z_loss_coeff = trainer.moe_z_loss_coeff


def tokens_by_sample(chosen: torch.Tensor, experts: int, tokens: RoutedTokens) -> torch.Tensor:
    """Count the tokens of each row by chosen expert; padding is not counted.

    Args:
        chosen: int64 [T, k].
        experts: E.
        tokens: of this rank.

    Returns:
        float32 [S, E].
    """
    places = (tokens.rows[:, None] * experts + chosen[tokens.places]).flatten()
    counts = torch.zeros(len(tokens) * experts, device=chosen.device)
    return counts.scatter_add_(0, places, torch.ones_like(places, dtype=counts.dtype)).view(-1, experts)


def auxiliary_loss(
    scores: torch.Tensor,
    counts: torch.Tensor,
    tokens: RoutedTokens,
    per_token: int,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return this rank's summand of the balancing loss of a layer.

    It is the mean over the samples of the step of E * sum_e f_e P_e (Switch Transformer, arXiv 2101.03961,
    equations 4 to 6, for each sequence), f_e being the share of the row's choices that expert e got and P_e
    the mean of its score. A sample of several rows has their mean, each by its share of the tokens. Rows are
    the same in every layout, and so is the loss.

    Args:
        scores: float32 [T, E], with a sum of 1 for each token.
        counts: float32 [S, E]: what `tokens_by_sample` returns.
        tokens: of this rank.
        per_token: k.
        group: ranks that have other tokens of the same samples; None: there are none.
    """
    if group is not None:
        dist.all_reduce(counts, group=group)
    shares = counts / (tokens.lengths[:, None] * per_token)
    slopes = shares * counts.size(1) * tokens.weights[:, None]
    return (scores[tokens.places] * slopes[tokens.rows]).sum()


def z_loss(logits: torch.Tensor, tokens: RoutedTokens) -> torch.Tensor:
    """Return this rank's summand of the mean of the squared log-sum-exp of the logits, float32 [T, E].

    ST-MoE, arXiv 2202.08906, equation 5; the mean is over the samples of the step, of means over their
    tokens.
    """
    squares = torch.logsumexp(logits, -1).square()
    return (squares[tokens.places] * tokens.weights[tokens.rows]).sum()


def updated_bias(bias: torch.Tensor, loads: torch.Tensor, rate: float) -> torch.Tensor:
    """Return the biases of a layer's choice after a step, without a loss (arXiv 2408.15664, algorithm 1).

    Args:
        bias: [E].
        loads: [E]: tokens that each expert got in the whole step.
        rate: by how much a bias changes.
    """
    return bias + rate * torch.sign(loads.mean() - loads).to(bias.dtype)


def extremes(loads: torch.Tensor) -> tuple[float | None, float | None]:
    """Return the largest and the smallest load of an expert in any layer, relative to an even one.

    Args:
        loads: [layers, E]: tokens that each expert got, 0 in layers without experts.

    Returns:
        (None, None) if there are none.
    """
    sparse = loads[loads.any(-1)].double()
    if not len(sparse):
        return None, None
    relative = sparse / sparse.mean(-1, keepdim=True)
    return float(relative.max()), float(relative.min())


def loads_by_layer(loads: Sequence[tuple[int, torch.Tensor]], layers: int, experts: int) -> torch.Tensor:
    """Arrange the loads (layer, [E]) of this rank's layers as float64 [layers, E], 0 for others."""
    table = torch.zeros(layers, experts, dtype=torch.float64)
    for layer, load in loads:
        table[layer] += load.double().cpu()
    return table
