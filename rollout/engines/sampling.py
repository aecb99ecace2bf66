"""Sampling on logits in plain torch: the distribution that is sampled from, and its log-probabilities."""

import torch

from rollout.engines.base import Sampling


def sampled_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities after temperature, then top-k, then top-p; greedy keeps those at temperature 1.

    Args:
        logits: [V].
        sampling: how to sample.

    Returns: [V] float32, -inf where a token cannot be sampled.
    """
    scores = logits.float()
    if sampling.temperature == 0:
        return scores.log_softmax(-1)
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered, index = scores.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        scores = scores.index_fill(0, index[before >= sampling.top_p], -torch.inf)
    return scores.log_softmax(-1)


def sample(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> tuple[int, float]:
    """One token from `logits` [V], and its log-probability as sampled."""
    logprobs = sampled_distribution(logits, sampling)
    greedy = sampling.temperature == 0
    token = int(logprobs.argmax() if greedy else torch.multinomial(logprobs.exp(), 1, generator=generator))
    return token, float(logprobs[token])
