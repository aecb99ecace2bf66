"""Describes a micro-batch's tokens to routers, and balances a step's tokens over the experts.

Shapes: T tokens of this rank, S rows of the micro-batch (samples or branches of samples), E experts of the
layer, k of them per token.
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
    """Assignment of a rank's tokens to rows. Shapes: T tokens of this rank, S rows, N tokens of rows.

    A row is a sample or a branch of a sample. A token computed once for several rows counts in each row;
    padding counts in none.
    """

    places: torch.Tensor
    """int64 [N], on the device: index of each row token among this rank's tokens."""
    rows: torch.Tensor
    """int64 [N], on the device: row of each token."""
    weights: torch.Tensor
    """float32 [S], on the device: weight of each row's tokens in the mean over the step's samples of the
    means over each sample's tokens."""
    lengths: torch.Tensor
    """float32 [S], on the device: number of tokens of each row over all ranks."""
    experts: torch.Tensor | None = None
    """int64 [layers with experts, T, k], on the device: experts that routers must use, -1 where they choose;
    None: routers always choose."""

    def __len__(self) -> int:
        """Return the number of rows, S."""
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
        rows: int64 [N]: row index, from 0, of each row token on this context rank.
        places: int64 [N]: index of each row token among this context rank's tokens.
        size: number of tokens on this context rank, including padding at the end.
        samples: number of samples of the whole step; at least 1.
        shares: float32 [S]: each row's share of its sample's tokens; None: each row is a sample.
        experts: int16 [tokens without padding, layers with experts, k]: recorded experts to replay, if any.
        part: index of this rank among the ranks that split these tokens equally.
        parts: number of these ranks.
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
    """Set the balancing coefficients in megatron's `config`, which routers read.

    Raises:
        SettingsError: the model has no router biases to update.
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
    """Count the tokens of each row by chosen expert, without padding.

    Args:
        chosen: int64 [T, k].
        experts: E.
        tokens: metadata of this rank's tokens.

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

    The loss is the mean over the step's samples of E * sum_e f_e P_e (Switch Transformer, arXiv 2101.03961,
    equations 4 to 6, per sequence). f_e is expert e's share of the row's choices, P_e its mean score. A
    sample with several rows has their mean, weighted by their shares of its tokens. Rows do not depend on the
    layout, so neither does the loss.

    Args:
        scores: float32 [T, E], summing to 1 for each token.
        counts: float32 [S, E]: result of `tokens_by_sample`.
        tokens: metadata of this rank's tokens.
        per_token: k.
        group: ranks with other tokens of the same samples; None: there are no such ranks.
    """
    if group is not None:
        dist.all_reduce(counts, group=group)
    shares = counts / (tokens.lengths[:, None] * per_token)
    slopes = shares * counts.size(1) * tokens.weights[:, None]
    return (scores[tokens.places] * slopes[tokens.rows]).sum()


def z_loss(logits: torch.Tensor, tokens: RoutedTokens) -> torch.Tensor:
    """Return this rank's summand of the mean squared log-sum-exp of the logits, float32 [T, E].

    ST-MoE, arXiv 2202.08906, equation 5. The mean is over the step's samples, of the means over their tokens.
    """
    squares = torch.logsumexp(logits, -1).square()
    return (squares[tokens.places] * tokens.weights[tokens.rows]).sum()


def updated_bias(bias: torch.Tensor, loads: torch.Tensor, rate: float) -> torch.Tensor:
    """Return a layer's updated expert biases for loss-free balancing (arXiv 2408.15664, algorithm 1).

    Args:
        bias: [E].
        loads: [E]: tokens per expert in the whole step.
        rate: absolute change of each bias.
    """
    return bias + rate * torch.sign(loads.mean() - loads).to(bias.dtype)


def extremes(loads: torch.Tensor) -> tuple[float | None, float | None]:
    """Return the largest and the smallest expert load in any layer, relative to an even load.

    Args:
        loads: [layers, E]: tokens per expert, 0 in layers without experts.

    Returns:
        (None, None) if all loads are 0.
    """
    sparse = loads[loads.any(-1)].double()
    if not len(sparse):
        return None, None
    relative = sparse / sparse.mean(-1, keepdim=True)
    return float(relative.max()), float(relative.min())


def loads_by_layer(loads: Sequence[tuple[int, torch.Tensor]], layers: int, experts: int) -> torch.Tensor:
    """Arrange the loads (layer, [E]) of this rank's layers as float64 [layers, E], 0 for other layers."""
    table = torch.zeros(layers, experts, dtype=torch.float64)
    for layer, load in loads:
        table[layer] += load.double().cpu()
    return table
