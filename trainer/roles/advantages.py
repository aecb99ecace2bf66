"""Gives a batch the advantages of single tokens: from a critic's values, or whitened as in REINFORCE++.

Shapes: n samples and t tokens of a replica's part.
"""

import dataclasses
from collections.abc import Sequence

import torch

from trainer.batch import Batch
from trainer.config import AlgorithmConfig
from trainer.functional.gae import generalized_advantages, terminal_rewards
from trainer.ranks.collectives import sum_replicas


def with_advantages(
    batch: Batch, values: torch.Tensor, config: AlgorithmConfig, replicas: Sequence[Sequence[int]]
) -> Batch:
    """Return the batch with the critic's values, returns, and advantages of single tokens. A collective.

    Tokens over the bound carry no gradient, so they have no advantage and do not count in the whitening, but
    rewards and values pass through them to the tokens before. Returns are advantages before the whitening,
    plus values.

    Args:
        batch: a replica's part, on the CPU.
        values: float32 [t], of `Critic.values`.
        config: discount, lambda, and whether advantages are whitened over all replicas.
        replicas: ranks of each replica.
    """
    sample, sampled = batch.sample_index, batch.sampled_mask
    advantages = generalized_advantages(
        token_rewards(batch, config),
        values,
        sampled,
        sample,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
    )
    returns = (advantages + values.double()) * sampled
    if config.whiten_advantages:
        advantages = whitened(advantages, batch.loss_mask, config.advantage_eps, replicas)
    return dataclasses.replace(
        batch,
        values=values,
        returns=returns.float(),
        advantages=(advantages * batch.loss_mask).float(),
    )


def with_whitened(batch: Batch, config: AlgorithmConfig, replicas: Sequence[Sequence[int]]) -> Batch:
    """Return the batch with REINFORCE++'s advantages of single tokens. A collective.

        A_t = r - kl_coef sum_(i >= t) (log pi_behaviour(o_i) - log pi_ref(o_i)), whitened over the batch

    Hu et al. 2025 (arXiv 2501.03262), section 3. i are the sampled tokens of the row from t on; without
    `use_kl_in_reward` there is no sum.

    Args:
        batch: a replica's part, on the CPU, whose advantages are r.
        config: `kl_coef`, and what the deviation is added to.
        replicas: ranks of each replica.
    """
    advantages = batch.advantages.double()
    if config.use_kl_in_reward and batch.reference_logprobs is not None:
        sample, sampled = batch.sample_index, batch.sampled_mask
        none = torch.zeros_like(advantages)
        gaps = behaviour_k1(batch, batch.reference_logprobs)
        later = generalized_advantages(gaps, none, sampled, sample, gamma=1, gae_lambda=1)
        advantages = advantages - config.kl_coef * later
    white = whitened(advantages, batch.loss_mask, config.advantage_eps, replicas)
    return dataclasses.replace(batch, advantages=white.float())


def behaviour_k1(batch: Batch, reference: torch.Tensor) -> torch.Tensor:
    """Return log pi_behaviour - log pi_ref of each sampled token, 0 elsewhere, float64 [t]."""
    return torch.where(batch.sampled_mask, batch.behaviour_logprobs - reference, 0.0).double()


def token_rewards(batch: Batch, config: AlgorithmConfig) -> torch.Tensor:
    """Return the reward that follows each sampled token, float64 [t]: that of the sample at its last one.

    Where turns were scored, those of turns, each at its turn's last one.
    With `use_kl_in_reward` less kl_coef (log pi_behaviour - log pi_ref) of each token: Ziegler et al. 2019
    (arXiv 1909.08593).
    """
    if batch.turn_rewards is None:
        rewards = terminal_rewards(batch.rewards, batch.sampled_mask, batch.sample_index)
    else:
        rewards = batch.turn_rewards.double()
    if config.use_kl_in_reward and batch.reference_logprobs is not None:
        rewards -= config.kl_coef * behaviour_k1(batch, batch.reference_logprobs)
    return rewards


def whitened(
    values: torch.Tensor, mask: torch.Tensor, eps: float, replicas: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Return (x - mean) / (std + eps) of the entries under a mask, [t], over all replicas; 0 elsewhere.

    std divides by the number of entries. A collective.
    """
    chosen = values[mask].double()
    tokens, total = sum_replicas(chosen.new_tensor([len(chosen), chosen.sum()]), replicas).tolist()
    mean = total / max(tokens, 1.0)
    squares = sum_replicas((chosen - mean).square().sum(), replicas)
    deviation = (float(squares) / max(tokens, 1.0)) ** 0.5
    result = torch.zeros_like(values, dtype=torch.float64)
    result[mask] = (chosen - mean) / (deviation + eps)
    return result
