"""Tests whether tokens were drawn from the distributions that they should have been drawn from.

A token has a place between 0 and 1: the mass of all tokens that are more probable, plus a uniform share of
its own. Places are uniform and independent if every token is drawn from its distribution given the tokens
before it, whatever those distributions are, so tokens of all positions and requests are tested together.
"""

import torch

BINS = 16
"""Cells of the chi-square test; a token of little mass lies in the last one."""
LEAST_P_VALUE = 1e-6
"""A right engine has less once in a million tests."""


def places(logprobs: torch.Tensor, tokens: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the place of each token.

    Args:
        logprobs: [T, V], the distribution that each token should have been drawn from.
        tokens: int [T].
        generator: of the uniform shares.

    Returns: float64 [T].
    """
    mass = logprobs.double().exp()
    own = mass.gather(-1, tokens[:, None])[:, 0]
    # among equally probable tokens the lower id counts as more probable
    more = mass > own[:, None]
    equal = (mass == own[:, None]) & (torch.arange(mass.shape[-1]) < tokens[:, None])
    before = (mass * (more | equal)).sum(-1)
    return before + own * torch.rand(len(tokens), generator=generator, dtype=torch.float64)


def uniformity(found: torch.Tensor) -> float:
    """Return the p-value of Pearson's chi-square test that places [N] are uniform, with `BINS` cells."""
    counts = torch.bincount((found * BINS).long().clamp(0, BINS - 1), minlength=BINS).double()
    expected = len(found) / BINS
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((BINS - 1) / 2, dtype=torch.float64), statistic / 2))
