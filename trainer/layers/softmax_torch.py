"""Computes a softmax over the vocabulary and its gradient in plain torch: the oracle of `softmax_triton`.

Tokens are processed in blocks whose float32 logits fit in the CPU's cache. Full-size arrays would be written
to fresh memory, which takes longer than the arithmetic.

Shapes: c tokens, v entries of the vocabulary on this rank, including padding.
"""

from collections.abc import Iterator

import torch

BLOCK_BYTES = 1 << 20
"""Size of a block's float32 logits, unless a single token has more."""


def statistics(
    logits: torch.Tensor, local: torch.Tensor, valid: int, temperature: float, softcap: float = 0.0
) -> torch.Tensor:
    """Return the statistics that determine the log-probability and the entropy of each token.

    With z = softcapped logits / temperature: max z, sum exp(z - max), sum exp(z - max) (z - max), and z at
    `local`.

    Args:
        logits: [c, v].
        local: int64 [c]: vocabulary index of each token.
        valid: number of entries before the padding; at least 1.
        temperature: positive.
        softcap: bound c of the logits x, which become c tanh(x / c); 0: unbounded.

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
    """Bound and scale float32 logits in place; return the largest of each row, and the logit at `local`."""
    if softcap:
        logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        logits.div_(temperature)
    return logits.amax(-1), logits.gather(-1, local[:, None])[:, 0]


def statistics_in_place(
    logits: torch.Tensor, local: torch.Tensor, valid: int, temperature: float, softcap: float = 0.0
) -> torch.Tensor:
    """Return `statistics` with 0 in the third row. Overwrites the logits."""
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
    is_local: torch.Tensor,
    normalizer: torch.Tensor,
    entropies: torch.Tensor,
    logprobs_grad: torch.Tensor,
    entropies_grad: torch.Tensor,
    valid: int,
    temperature: float,
    softcap: float = 0.0,
) -> None:
    """Replace logits by the gradient with respect to them; padding becomes 0.

    Args:
        logits: [c, v].
        local: int64 [c]: index of the target.
        is_local: bool [c]: whether the target is on this rank.
        normalizer: float32 [c]: log sum exp of the scaled logits over the whole vocabulary.
        entropies: float32 [c].
        logprobs_grad: float32 [c]: gradient of the loss with respect to the log-probability.
        entropies_grad: float32 [c]: gradient of the loss with respect to the entropy.
        valid: number of entries before the padding.
        temperature: positive.
        softcap: bound of the logits, as in `statistics`.
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
        slope.scatter_add_(-1, local[one, None], (logprobs_grad[one] * is_local[one])[:, None])
        if softcap:
            slope.mul_(inner)
        logits[one, :valid] = slope.div_(temperature)
    logits[:, valid:] = 0


def _blocks(logits: torch.Tensor) -> Iterator[slice]:
    """Yield the token range of each block; at least one block."""
    count = max(1, BLOCK_BYTES // (4 * logits.size(1)))
    return (slice(first, first + count) for first in range(0, max(1, len(logits)), count))
