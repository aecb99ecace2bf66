"""Computes advantages of samples from the rewards of their groups, or of tokens from rewards and values.

The samples of one prompt are the baseline. Penalties for overlong samples are added to the rewards
beforehand. All functions compute in float64; most return float32.

Shapes: N samples of the batch; t tokens of n samples, one sample after the other.
"""

import torch

from trainer.functional.shapes import FloatN, IntN


def group_normalised(rewards: FloatN, group_index: IntN, eps: float) -> FloatN:
    """Return GRPO's A_i = (r_i - mean(r)) / (std(r) + eps) over the group of sample i.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2. std divides by the group size, not by size - 1. Groups of
    one sample and groups of equal rewards have advantage 0.

    Args:
        rewards: float [N].
        group_index: int64 [N]: group of each sample, starting at 0.
        eps: positive.

    Returns:
        float32 [N].
    """
    centred, sizes = _centred(rewards, group_index)
    variance = torch.zeros_like(sizes).index_add_(0, group_index, centred.square()) / sizes.clamp_min(1)
    return (centred / (variance.sqrt()[group_index] + eps)).float()


def group_centred(rewards: FloatN, group_index: IntN) -> FloatN:
    """Return Dr. GRPO's A_i = r_i - mean(r) over the group of sample i, float32 [N].

    Dividing by the std would favour prompts of low variance. Liu et al. 2025, "Understanding R1-Zero-like
    training" (arXiv 2503.20783), section 3.2. Arguments as in `group_normalised`.
    """
    return _centred(rewards, group_index)[0].float()


def leave_one_out(rewards: FloatN, group_index: IntN) -> FloatN:
    """Return RLOO's A_i = r_i - mean of the other samples of the group, float32 [N]; 0 in a group of one.

    Kool et al. 2019; Ahmadian et al. 2024 (arXiv 2402.14740), section 3. Arguments as in
    `group_normalised`.
    """
    centred, sizes = _centred(rewards, group_index)
    return (centred * (sizes / (sizes - 1).clamp_min(1))[group_index]).float()


def overlong_punishment(lengths: IntN, limit: int, buffer: int) -> FloatN:
    """Return DAPO's soft overlong punishment R_length of each sample, between -1 and 0.

    0 up to limit - buffer tokens, then (limit - buffer - |y|) / buffer, and -1 from `limit` on. Yu et al.
    2025 (arXiv 2503.14476), section 3.4, eq. 13, where `limit` is L_max and `buffer` L_cache.

    Args:
        lengths: int64 [N]: |y|, the tokens of each response.
        limit: tokens.
        buffer: tokens, at least 1.

    Returns:
        float32 [N].
    """
    return ((limit - buffer - lengths.double()) / buffer).clamp(-1.0, 0.0).float()


def _centred(rewards: torch.Tensor, group_index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (r_i - mean of the group [N], size of each group) in float64."""
    values = rewards.double()
    sizes = torch.bincount(group_index).double()
    means = torch.zeros_like(sizes).index_add_(0, group_index, values) / sizes.clamp_min(1)
    return values - means[group_index], sizes


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    sampled: torch.Tensor,
    sample: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> torch.Tensor:
    """Return A_i = d_i + gamma lambda A_(i+1), d_i = r_i + gamma v_(i+1) - v_i, over the tokens of a sample.

    Schulman et al. 2015 (arXiv 1506.02438), eq. 11 and 16. i counts the tokens that the model sampled. Tokens
    that tools or templates inserted are part of the environment and are skipped. A and v are 0 after the last
    token.

    Args:
        rewards: [t]: reward after each sampled token.
        values: [t]: value of the state in which each token was sampled.
        sampled: bool [t].
        sample: int64 [t]: index of each token's sample, ascending.
        gamma: discount factor of later rewards.
        gae_lambda: weight of later rewards; 0 uses the values, 1 only the rewards.

    Returns:
        float64 [t]; 0 for tokens that were not sampled.
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


def terminal_rewards(rewards: torch.Tensor, sampled: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """Return the reward of each sample at its last sampled token, 0 elsewhere: float64 [t].

    Args:
        rewards: [n]: reward of each sample.
        sampled: bool [t].
        sample: int64 [t]: index of each token's sample, ascending.
    """
    result = torch.zeros(len(sampled), dtype=torch.float64)
    place = sampled.nonzero()[:, 0]
    last = torch.full((len(rewards),), -1).scatter_reduce(0, sample[place], place, "amax")
    found = last >= 0
    result[last[found]] = rewards[found].double()
    return result
