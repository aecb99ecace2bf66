"""Estimates the advantage of every sampled token from rewards and values of single tokens.

Shapes: t tokens of n samples, one sample after the other; L sampled tokens of the longest one.
"""

import torch
from torch import Tensor


def generalized_advantages(
    rewards: Tensor, values: Tensor, sampled: Tensor, sample: Tensor, *, gamma: float, gae_lambda: float
) -> Tensor:
    """Return A_i = d_i + gamma lambda A_(i+1), d_i = r_i + gamma v_(i+1) - v_i, over the tokens of a sample.

    Schulman et al. 2015 (arXiv 1506.02438), eq. 11 and 16. i counts the tokens that the model sampled: tokens
    that tools or templates inserted are part of the environment, and are skipped. A and v are 0 after the
    last one.

    Args:
        rewards: [t]: reward that follows each sampled token.
        values: [t]: value of the state in which each was sampled.
        sampled: bool [t].
        sample: int64 [t]: index of each token's sample, ascending.
        gamma: discount of later tokens' rewards.
        gae_lambda: 0 trusts the values, 1 the rewards alone.

    Returns:
        float64 [t]; 0 where not sampled.
    """
    result = torch.zeros(len(sampled), dtype=torch.float64)
    place = sampled.nonzero()[:, 0]
    if not len(place):
        return result
    row = sample[place]
    counts = torch.bincount(row)
    column = torch.arange(len(place)) - (counts.cumsum(0) - counts)[row]
    # zero rewards and values after the last token of each sample
    table = torch.zeros(2, len(counts), int(counts.max()) + 1, dtype=torch.float64)
    table[0, row, column], table[1, row, column] = rewards[place].double(), values[place].double()
    reward_table, value_table = table
    advantages = reward_table[:, :-1] + gamma * value_table[:, 1:] - value_table[:, :-1]
    for index in reversed(range(advantages.shape[1] - 1)):
        advantages[:, index] += gamma * gae_lambda * advantages[:, index + 1]
    result[place] = advantages[row, column]
    return result


def terminal_rewards(rewards: Tensor, sampled: Tensor, sample: Tensor) -> Tensor:
    """Return the reward of each sample at its last sampled token, 0 elsewhere: float64 [t].

    Args:
        rewards: [n]: of samples.
        sampled: bool [t].
        sample: int64 [t]: index of each token's sample, ascending.
    """
    result = torch.zeros(len(sampled), dtype=torch.float64)
    place = sampled.nonzero()[:, 0]
    last = torch.full((len(rewards),), -1).scatter_reduce(0, sample[place], place, "amax")
    found = last >= 0
    result[last[found]] = rewards[found].double()
    return result
