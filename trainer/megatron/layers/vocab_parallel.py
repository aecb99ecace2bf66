"""Computes log-probabilities and entropies from logits whose vocabulary is split over tensor ranks.

Shapes: T tokens, V vocabulary, P tensor ranks; rank r holds the logits of rows [r V' / P, (r + 1) V' / P), V'
being V padded.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

SLICE_ELEMENTS = 1 << 24
"""Number of logits that are held in float32 at a time: 64 MiB."""


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    vocabulary: int,
    temperature: float = 1.0,
    rank: int = 0,
    size: int = 1,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log softmax(logits / temperature) at the targets, and that distribution's entropy, in nats.

    Every rank of the group gets the same result, and in the backward pass the gradient of its own logits, so
    that no collective is needed there: upstream gradients are the same on all of them. Logits of the padding
    are left out, as if they were minus infinity.

    Args:
        logits: [T, V' / P] any float dtype; computed in float32.
        targets: int64 [T] in [0, V).
        vocabulary: V, without padding.
        temperature: at which the tokens were sampled; positive.
        rank: this tensor rank.
        size: number of tensor ranks.
        group: their process group; not needed with one.

    Returns:
        float32 [T] log-probabilities and float32 [T] entropies; gradients flow through both.
    """
    logprobs, entropies = _VocabParallel.apply(logits, targets, vocabulary, temperature, rank, size, group)
    return logprobs, entropies


class _VocabParallel(torch.autograd.Function):
    """Saves the logits and two numbers for each token; both passes work through the tokens in slices."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        vocabulary: int,
        temperature: float,
        rank: int,
        size: int,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part = logits.size(-1)
        valid = min(max(vocabulary - rank * part, 0), part)
        local = targets - rank * part
        mine = (local >= 0) & (local < valid)
        local = torch.where(mine, local, 0)
        highest = torch.full((len(logits),), -torch.inf, device=logits.device)
        if valid:
            highest = logits[:, :valid].amax(-1).float() / temperature
        if size > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        sums = torch.zeros(3, len(logits), device=logits.device)
        for rows in _slices(logits) if valid else ():
            scaled = (logits[rows, :valid].float() / temperature).sub_(highest[rows, None])
            sums[2, rows] = scaled.gather(-1, local[rows, None])[:, 0] * mine[rows]
            exponentials = scaled.exp()
            sums[0, rows] = exponentials.sum(-1)
            sums[1, rows] = torch.linalg.vecdot(exponentials, scaled)
        if size > 1:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
        log_total = total.log()
        entropies = log_total - weighted / total
        ctx.save_for_backward(logits, local, mine, highest + log_total, entropies)
        ctx.temperature, ctx.valid = temperature, valid
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Compute the gradients with p = softmax(z / temperature) and entropy H.

        d log p_t / d z_j = ([j = t] - p_j) / temperature
        d H / d z_j = -p_j (log p_j + H) / temperature
        """
        logits, local, mine, normalizer, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = gradients
        result = torch.zeros_like(logits)
        for rows in _slices(logits) if ctx.valid else ():
            log_p = (logits[rows, : ctx.valid].float() / ctx.temperature).sub_(normalizer[rows, None])
            factor = (
                torch.zeros_like(log_p)
                if of_entropies is None
                else (log_p + entropies[rows, None]) * -of_entropies[rows, None]
            )
            if of_logprobs is not None:
                factor -= of_logprobs[rows, None]
            slope = log_p.exp_().mul_(factor)
            if of_logprobs is not None:
                slope.scatter_add_(-1, local[rows, None], (of_logprobs * mine)[rows, None])
            result[rows, : ctx.valid] = slope.div_(ctx.temperature).to(result.dtype)
        return result, None, None, None, None, None, None


def _slices(logits: torch.Tensor) -> Iterator[slice]:
    step = max(1, SLICE_ELEMENTS // max(1, logits.size(-1)))
    return (slice(first, first + step) for first in range(0, len(logits), step))
