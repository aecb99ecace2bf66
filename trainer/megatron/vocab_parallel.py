"""Log-probabilities and entropies from logits whose vocabulary is split over tensor ranks.

Shapes: T tokens, V vocabulary, P tensor ranks; rank r holds the logits of rows [r V' / P, (r + 1) V' / P), V' being V padded.
"""

from typing import Any

import torch
import torch.distributed as dist

PADDING = -1e9
"""Logit of the padding rows: finite, and nothing after the exponential."""


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
    """log softmax(logits / temperature) at the targets, and the entropy of that distribution, in nats.

    Every rank of the group gets the same result, and in the backward pass the gradient of its own logits, so that no collective is needed
    there: upstream gradients are the same on all of them.

    Args:
        logits: [T, V' / P] any float dtype; computed in float32.
        targets: int64 [T] in [0, V).
        vocabulary: V, without padding.

    Returns:
        float32 [T] log-probabilities and float32 [T] entropies; gradients flow through both.
    """
    logprobs, entropies = _VocabParallel.apply(logits, targets, vocabulary, temperature, rank, size, group)
    return logprobs, entropies


class _VocabParallel(torch.autograd.Function):
    """One pass over the vocabulary each way; keeps one [T, V' / P] tensor of probabilities."""

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
        wide = logits.float()
        highest = wide[:, :valid].amax(-1) if valid else wide.new_full((len(wide),), PADDING)
        if size > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        scaled = wide - highest.unsqueeze(-1)
        if temperature != 1.0:
            scaled /= temperature
        scaled[:, valid:] = PADDING
        local = targets - rank * part
        mine = (local >= 0) & (local < part)
        local = torch.where(mine, local, 0)
        picked = scaled.gather(-1, local.unsqueeze(-1)).squeeze(-1) * mine
        exponentials = scaled.exp()
        sums = torch.stack([exponentials.sum(-1), torch.linalg.vecdot(exponentials, scaled), picked])
        if size > 1:
            dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
        log_total = total.log()
        entropies = log_total - weighted / total
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, mine, entropies)
        ctx.temperature = temperature
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropies

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """d log p_t / d z_j = [j = t] - p_j and d H / d z_j = -p_j (log p_j + H)."""
        probabilities, local, mine, entropies = ctx.saved_tensors
        of_logprobs, of_entropies = gradients
        result = torch.zeros_like(probabilities) if of_logprobs is None else probabilities * -of_logprobs.unsqueeze(-1)
        if of_logprobs is not None:
            result.scatter_add_(-1, local.unsqueeze(-1), (of_logprobs * mine).unsqueeze(-1))
        if of_entropies is not None:
            surprise = torch.special.xlogy(probabilities, probabilities) + probabilities * entropies.unsqueeze(-1)
            result -= surprise * of_entropies.unsqueeze(-1)
        if ctx.temperature != 1.0:
            result /= ctx.temperature
        return result.to(ctx.dtype), None, None, None, None, None, None
