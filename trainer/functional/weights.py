"""Computes the weight of each trained token of a sample in the loss of a step, from the whole batch.

Weights count all *sampled* tokens, also those that the bound masked: masking removes a token's share and
gives it to no other, so that the few fresh tokens of a late sample do not weigh more than they would have on
time.
All take int64 [N], the sampled tokens of each of N samples, and return float32 [N].
"""

import torch

from trainer.functional.shapes import FloatN, IntN


def sample_mean(sampled_tokens: IntN) -> FloatN:
    """Return 1 / (N |o_i|): the mean over the tokens of a sample, then over samples."""
    return 1.0 / (sampled_tokens.clamp_min(1) * max(len(sampled_tokens), 1))


def token_mean(sampled_tokens: IntN) -> FloatN:
    """Return 1 / sum_i |o_i|: the mean over all tokens, so that long samples weigh more."""
    return torch.ones(len(sampled_tokens)) / sampled_tokens.sum().clamp_min(1)


def sample_sum(sampled_tokens: IntN) -> FloatN:
    """Return 1 / N: the sum over the tokens of a sample, then the mean over samples."""
    return torch.ones(len(sampled_tokens)) / max(len(sampled_tokens), 1)


def constant(sampled_tokens: IntN, budget: int) -> FloatN:
    """Return 1 / (N M), M being `budget`, or if that is 0 the tokens of the longest sample."""
    divisor = budget or max(int(sampled_tokens.max()), 1)
    return torch.ones(len(sampled_tokens)) / (divisor * len(sampled_tokens))
