"""Computes a softmax over the vocabulary, and its gradient, in plain torch: the oracle of `softmax_triton`.

It goes by blocks of tokens whose float32 logits stay in a processor's cache: arrays for all of them would be
written to fresh memory, which takes longer than the arithmetic.

Shapes: c tokens, v entries of the vocabulary on this rank, padding included.
"""

from collections.abc import Iterator

import torch

BLOCK_BYTES = 1 << 20
"""Size of a block's logits in float32, unless one token's take more."""


def statistics(
    logits: torch.Tensor, local: torch.Tensor, valid: int, temperature: float, softcap: float = 0.0
) -> torch.Tensor:
    """Return the statistics that give the log-probability and the entropy of each token.

    With z = logits / temperature, logits bounded by `softcap`: max z, sum exp(z - max), sum exp(z - max)
    (z - max), and z at `local`.

    Args:
        logits: [c, v].
        local: int64 [c]: an index into the vocabulary for each token.
        valid: entries before the padding; at least 1.
        temperature: positive.
        softcap: bound c of the logits x, which become c tanh(x / c); 0: none.

    Returns:
        float32 [4, c].
    """
    parts = [_statistics(logits[one, :valid], local[one], temperature, softcap) for one in _blocks(logits)]
    return torch.cat(parts, dim=1)


def _statistics(
    logits: torch.Tensor, local: torch.Tensor, temperature: float, softcap: float
) -> torch.Tensor:
    scaled = logits.to(torch.float32, copy=True)
    highest, chosen = _scale(scaled, local, temperature, softcap)
    exponentials = scaled.sub_(highest[:, None]).exp()
    return torch.stack([highest, exponentials.sum(-1), torch.linalg.vecdot(exponentials, scaled), chosen])


def _scale(
    logits: torch.Tensor, local: torch.Tensor, temperature: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bound and scale float32 logits in place; return the largest of each row, and the one at `local`."""
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        logits.div_(temperature)
    return logits.amax(-1), logits.gather(-1, local[:, None])[:, 0]


def statistics_in_place(
    logits: torch.Tensor, local: torch.Tensor, valid: int, temperature: float, softcap: float = 0.0
) -> torch.Tensor:
    """Return the same with 0 in place of the sum of exponential times logit; the logits are lost."""
    parts = [_totals(logits[one, :valid], local[one], temperature, softcap) for one in _blocks(logits)]
    return torch.cat(parts, dim=1)


def _totals(logits: torch.Tensor, local: torch.Tensor, temperature: float, softcap: float) -> torch.Tensor:
    scaled = logits.float()  # the same memory if they are float32
    highest, chosen = _scale(scaled, local, temperature, softcap)
    total = scaled.sub_(highest[:, None]).exp_().sum(-1)
    return torch.stack([highest, total, torch.zeros_like(total), chosen])


def to_slopes(
    logits: torch.Tensor,
    local: torch.Tensor,
    mine: torch.Tensor,
    normalizer: torch.Tensor,
    entropies: torch.Tensor,
    logprobs_grad: torch.Tensor,
    entropies_grad: torch.Tensor,
    valid: int,
    temperature: float,
    softcap: float = 0.0,
) -> None:
    """Replace logits by the gradient with respect to them; 0 for the padding.

    Args:
        logits: [c, v].
        local: int64 [c]: index of the target.
        mine: bool [c]: whether the target is in this rank's part.
        normalizer: float32 [c]: log sum exp of the scaled logits over the whole vocabulary.
        entropies: float32 [c].
        logprobs_grad: float32 [c]: gradient of the loss with respect to the log-probability.
        entropies_grad: float32 [c]: and to the entropy.
        valid: entries before the padding.
        temperature: positive.
        softcap: as of `statistics`.
    """
    for one in _blocks(logits):
        bounded = logits[one, :valid].float()
        if softcap:
            bounded = (bounded / softcap).tanh_()
            inner = 1 - bounded.square()
            bounded.mul_(softcap)
        log_p = (bounded / temperature).sub_(normalizer[one, None])
        factor = (log_p + entropies[one, None]).mul_(-entropies_grad[one, None])
        slope = log_p.exp_().mul_(factor.sub_(logprobs_grad[one, None]))
        slope.scatter_add_(-1, local[one, None], (logprobs_grad[one] * mine[one])[:, None])
        if softcap:
            slope.mul_(inner)
        logits[one, :valid] = slope.div_(temperature)
    logits[:, valid:] = 0


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Yield the tokens of each block, of one at least."""
    count = max(1, BLOCK_BYTES // (4 * logits.size(1)))
    return (slice(first, first + count) for first in range(0, max(1, len(logits)), count))
