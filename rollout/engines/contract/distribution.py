"""Tests whether tokens were drawn from the expected distributions.

A token's place in [0, 1] is the probability mass of all more probable tokens, plus a uniform fraction of its
own mass. If every token is drawn from its distribution given the previous tokens, places are uniform and
independent for any distributions. Tokens of all positions and requests are therefore tested together.
"""

import torch

BINS = 16
"""Cells of the chi-square test; tokens of little mass lie in the last one."""
MIN_P_VALUE = 1e-6
"""A correct engine gets a smaller p-value once in a million tests."""


def places(logprobs: torch.Tensor, tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the place of each token.

    Args:
        logprobs: [T, V] distribution that each token should be drawn from.
        tokens: [T] int.
        generator: source of the uniform fractions.

    Returns: [T] float64.
    """
    mass = logprobs.double().exp()
    own = mass.gather(-1, tokens[:, None])[:, 0]
    # break ties by token id
    more = mass > own[:, None]
    equal = (mass == own[:, None]) & (torch.arange(mass.shape[-1]) < tokens[:, None])
    before = (mass * (more | equal)).sum(-1)
    return before + own * torch.rand(len(tokens), generator=generator, dtype=torch.float64)


def uniformity(found: torch.Tensor) -> float:
    """Return the p-value of Pearson's chi-square test for uniform places [N], with `BINS` cells."""
    counts = torch.bincount((found * BINS).long().clamp(0, BINS - 1), minlength=BINS).double()
    expected = len(found) / BINS
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((BINS - 1) / 2, dtype=torch.float64), statistic / 2))
