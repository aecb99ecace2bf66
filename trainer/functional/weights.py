"""Computes each sample's loss weight per trained token from the whole batch.

Weights count all *sampled* tokens, including tokens masked by the staleness bound. Masking a token removes
its share instead of giving the share to other tokens: the remaining tokens of a late sample do not gain
weight.
All functions take the sampled tokens of N samples, int64 [N], and return float32 [N].
"""

import torch

from trainer.functional.shapes import FloatN, IntN


def sample_mean(sampled_tokens: IntN) -> FloatN:
    """Return 1 / (N |o_i|): the mean over the tokens of a sample, then over samples."""
    return 1.0 / (sampled_tokens.clamp_min(1) * max(len(sampled_tokens), 1))


def token_mean(sampled_tokens: IntN) -> FloatN:
    """Return 1 / sum_i |o_i|: the mean over all tokens. Longer samples weigh more."""
    return torch.ones(len(sampled_tokens)) / sampled_tokens.sum().clamp_min(1)


def sample_sum(sampled_tokens: IntN) -> FloatN:
    """Return 1 / N: the sum over the tokens of a sample, then the mean over samples."""
    return torch.ones(len(sampled_tokens)) / max(len(sampled_tokens), 1)


def constant(sampled_tokens: IntN, budget: int) -> FloatN:
    """Return 1 / (N M), where M is `budget`, or the token count of the longest sample if `budget` is 0."""
    divisor = budget or max(int(sampled_tokens.max()), 1)
    return torch.ones(len(sampled_tokens)) / (divisor * len(sampled_tokens))
