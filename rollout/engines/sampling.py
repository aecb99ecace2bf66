"""Samples from logits in plain torch, with log-probabilities of the distribution that is sampled from."""

import torch

from rollout.engines.base import Sampling


def sampled_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return log-probabilities after temperature, then top-k, then top-p; for greedy, at temperature 1.

    Args:
        logits: [V].
        sampling: the request's sampling parameters.

    Returns: [V] float32, -inf where a token cannot be sampled.
    """
    scores = logits.float()
    if sampling.temperature == 0:
        return scores.log_softmax(-1)
    scores = scores / sampling.temperature
    if sampling.top_k or sampling.top_p < 1:
        limits = (
            torch.tensor([sampling.top_k], device=scores.device),
            torch.tensor([sampling.top_p], device=scores.device),
        )
        scores = scores.masked_fill(~kept_tokens(scores[None], *limits)[0], -torch.inf)
    return scores.log_softmax(-1)


def kept_tokens(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Return which tokens top-k and then top-p keep.

    Top-k keeps the `top_k` best tokens and those that equal the last of them; top-p keeps the fewest of these
    whose probabilities reach `top_p`.

    Args:
        scores: [B, V] logits after temperature.
        top_k: [B]; 0 and what exceeds V are off.
        top_p: [B]; 1 is off.

    Returns: [B, V] bool.
    """
    ordered, index = scores.sort(descending=True)
    size = scores.shape[-1]
    last = torch.where(top_k > 0, top_k, size).clamp(max=size).long() - 1
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, last[:, None]), -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    kept = (ordered > -torch.inf) & ((before < top_p[:, None]) | (top_p[:, None] >= 1))
    return torch.zeros_like(kept).scatter(-1, index, kept)


def sample(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """Sample one token from `logits` [V]; return it and its log-probability as sampled."""
    logprobs = sampled_distribution(logits, sampling)
    greedy = sampling.temperature == 0
    token = int(logprobs.argmax() if greedy else torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, float(logprobs[token])
