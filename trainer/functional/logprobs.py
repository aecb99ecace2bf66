"""Computes log-probabilities and entropy without a second array of the logits' size.

A plain `log_softmax` keeps its [k, V] output in float32 for the backward pass. This implementation keeps only
[k] in addition to the logits. Both passes process the rows in slices.
"""

from typing import Any

import torch

from trainer.functional.shapes import FloatK, IntK, LogitsKV

SLICE_ELEMENTS = 1 << 24
"""Number of logits held in float32 at a time: 64 MiB."""


class _Selected(torch.autograd.Function):
    """(logits [R, V], tokens [R], temperature) -> (log-probabilities [R], entropy [R]).

    Computes in float32, or in float64 for float64 logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_RV: torch.Tensor, tokens_R: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_R = torch.empty(len(tokens_R), dtype=_softmax_dtype(logits_RV), device=logits_RV.device)
        entropy_R, lse_R = torch.empty_like(logprobs_R), torch.empty_like(logprobs_R)
        for rows in _slices(logits_RV):
            scaled = logits_RV[rows].to(logprobs_R.dtype) / temperature
            lse = torch.logsumexp(scaled, dim=-1)
            logprobs_R[rows] = scaled.gather(-1, tokens_R[rows, None])[:, 0] - lse
            log_p = _log_p(scaled, lse)
            entropy_R[rows] = -(log_p.exp() * log_p).sum(dim=-1)
            lse_R[rows] = lse
        ctx.save_for_backward(logits_RV, tokens_R, lse_R, entropy_R)
        ctx.temperature = temperature
        return logprobs_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_RV, tokens_R, lse_R, entropy_R = ctx.saved_tensors
        by_logprob_R, by_entropy_R = gradients
        out_RV = torch.empty_like(logits_RV)
        for rows in _slices(logits_RV):
            log_p = _log_p(logits_RV[rows].to(lse_R.dtype) / ctx.temperature, lse_R[rows])
            # d logprob / d z_j = [j = token] - p_j;  d entropy / d z_j = -p_j (log p_j + entropy)
            slope = -by_logprob_R[rows, None] - by_entropy_R[rows, None] * (log_p + entropy_R[rows, None])
            grad = log_p.exp() * slope
            grad.scatter_add_(-1, tokens_R[rows, None], by_logprob_R[rows, None])
            out_RV[rows] = (grad / ctx.temperature).to(out_RV.dtype)
        return out_RV, None, None


def token_logprobs(logits: LogitsKV, tokens: IntK, temperature: float = 1.0) -> tuple[FloatK, FloatK]:
    """Return the log-probability of each token, and the entropy of the token's distribution.

        z = logits[i] / temperature
        logprob[i] = z[tokens[i]] - log sum_v exp z_v
        entropy[i] = -sum_v p_v log p_v,  p = softmax(z)

    Both are differentiable in `logits`. A logit of -inf counts as probability 0.

    Args:
        logits: [k, V]: row i predicts token i. Any floating dtype.
        tokens: int64 [k].
        temperature: sampling temperature; positive.

    Returns:
        (logprobs, entropy), both [k] in nats, float32 (float64 for float64 logits).
    """
    logprobs, entropy = _Selected.apply(logits, tokens, temperature)
    return logprobs, entropy


def _softmax_dtype(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _log_p(scaled: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return log p, clamped to the smallest finite number: p * log p of an impossible token is 0, not nan."""
    return (scaled - lse[:, None]).clamp_min(torch.finfo(scaled.dtype).min)


def _slices(logits_RV: torch.Tensor) -> list[slice]:
    rows, vocabulary = logits_RV.shape
    size = max(1, SLICE_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
