"""Computes per-token advantages: from a critic, whitened, penalised, from a teacher, or from scores.

Shapes: n samples and t tokens of a replica's part, N samples of the step.

Penalties and the teacher's advantages refer to the behaviour policy, which sampled the tokens: k1 = log
pi_behaviour - log pi_other is an unbiased one-token estimate of KL(pi_behaviour || pi_other) (Schulman,
"Approximating KL divergence", 2020). Every rank calls every function with the part of its replica.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from protocol.errors import RewardError
from trainer.algorithms.base import Algorithm
from trainer.algorithms.registry import ALGORITHMS
from trainer.backends.base import Backend
from trainer.batch import Batch
from trainer.config import AlgorithmConfig
from trainer.functional.advantages import generalized_advantages, terminal_rewards
from trainer.ranks.collectives import sum_replicas
from trainer.roles.models import FrozenModels


def with_advantages(
    batch: Batch, values: torch.Tensor, config: AlgorithmConfig, replicas: Sequence[Sequence[int]]
) -> Batch:
    """Return the batch with the critic's values, returns, and per-token advantages. A collective.

    Tokens over the bound carry no gradient, so their advantage is 0 and they do not count in the whitening.
    Rewards and values still pass through them to earlier tokens. Returns are unwhitened advantages plus
    values.

    Args:
        batch: a replica's part, on the CPU.
        values: float32 [t], of `Critic.values`.
        config: discount, lambda, and whether to whiten advantages over all replicas.
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
    """Return the batch with REINFORCE++'s per-token advantages. A collective.

        A_t = r - kl_coef sum_(i >= t) (log pi_behaviour(o_i) - log pi_ref(o_i)), whitened over the batch

    Hu et al. 2025 (arXiv 2501.03262), section 3. The sum covers the sampled tokens of the row from t on, and
    is omitted without `use_kl_in_reward`.

    Args:
        batch: a replica's part, on the CPU, whose advantages are r.
        config: `kl_coef`, and the epsilon of the whitening.
    """
    advantages = batch.advantages.double()
    if config.use_kl_in_reward and batch.reference_logprobs is not None:
        sample, sampled = batch.sample_index, batch.sampled_mask
        none = torch.zeros_like(advantages)
        gaps = token_k1(batch, batch.reference_logprobs, batch.sampled_mask).double()
        later = generalized_advantages(gaps, none, sampled, sample, gamma=1, gae_lambda=1)
        advantages = advantages - config.kl_coef * later
    white = whitened(advantages, batch.loss_mask, config.advantage_eps, replicas)
    return dataclasses.replace(batch, advantages=white.float())


def token_rewards(batch: Batch, config: AlgorithmConfig) -> torch.Tensor:
    """Return the reward that follows each sampled token, float64 [t]: the sample's, at its last token.

    If turns were scored: each turn's reward, at the turn's last token. With `use_kl_in_reward`, minus kl_coef
    (log pi_behaviour - log pi_ref) of each token: Ziegler et al. 2019 (arXiv 1909.08593).
    """
    if batch.turn_rewards is None:
        rewards = terminal_rewards(batch.rewards, batch.sampled_mask, batch.sample_index)
    else:
        rewards = batch.turn_rewards.double()
    if config.use_kl_in_reward and batch.reference_logprobs is not None:
        rewards -= config.kl_coef * token_k1(batch, batch.reference_logprobs, batch.sampled_mask).double()
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


def with_frozen(
    part: Batch, policy: Backend, frozen: FrozenModels, algorithm: Algorithm, *, reference: bool
) -> tuple[Batch, dict[str, Any]]:
    """Return the part with the frozen models' values, and their measurements by `StepStats` field.

    Args:
        part: part of this rank's replica.
        policy: keeps the initial weights if they are the reference model.
        algorithm: determines how the values change advantages.
    """
    fields: dict[str, Any] = {}
    if reference:
        part = dataclasses.replace(part, reference_logprobs=frozen.reference_logprobs(policy, part))
    if frozen.reward_model is not None:
        scores = frozen.reward_model.evaluate(part)
        part, fields["reward_model_mean"] = _scored(part, policy, scores, algorithm, frozen.reward_weight)
    if algorithm.config.use_kl_in_reward:
        part, fields["reward_kl_k1"] = _penalised(part, policy, algorithm)
    if frozen.teacher is not None:
        part, kl = _distilled(part, policy, frozen.teacher.evaluate(part), algorithm.config.opd_kl_coef)
        fields |= {} if kl is None else {"teacher_kl_k1": kl}
    return part, fields


def _scored(
    part: Batch, policy: Backend, scores: torch.Tensor, algorithm: Algorithm, weight: float
) -> tuple[Batch, float]:
    """Add scores to the rewards and recompute advantages; also return the mean score of a sample.

        r'_i = r_i + weight s_i,  s_i: mean score of the branches of sample i

    Raises:
        RewardError: a score is not finite.
    """
    at_ends = scores[part.offsets[1:] - 1].double()
    rewards, groups, sums, branches = _with_rewards(part, policy, at_ends, torch.ones_like(at_ends))
    found = sums / branches
    if not bool(found.isfinite().all()):
        sample = int((~found.isfinite()).nonzero()[0])
        raise RewardError(
            f"step {part.step}: the score of sample {sample} of the batch by the model of reward_model.path "
            f"is {float(found[sample])}"
        )
    total = (rewards + weight * found).float()
    part = dataclasses.replace(part, rewards=total[part.rows])
    return _advantages_from(part, algorithm, total, groups), float(found.mean())


def _penalised(part: Batch, policy: Backend, algorithm: Algorithm) -> tuple[Batch, float]:
    """Recompute advantages from penalised rewards of the whole step; also return the mean penalty.

        r'_i = r_i - kl_coef sum_t (log pi_behaviour(o_t) - log pi_ref(o_t)),  t: sampled tokens of sample i

    This is the penalty of PPO's reward (Ziegler et al. 2019, arXiv 1909.08593), summed over the sample.
    Per-token advantages are unchanged: their estimators subtract the later terms of each token.
    """
    if part.reference_logprobs is None:
        raise RuntimeError("a penalty needs reference log-probabilities")
    sums = _sums_of_samples(token_k1(part, part.reference_logprobs, part.sampled_mask), part)
    rewards, groups, penalties = _with_rewards(part, policy, sums)
    entry = ALGORITHMS[algorithm.config.name]
    if entry.has_critic or entry.whitened:
        return part, float(penalties.mean())
    penalised = (rewards - algorithm.config.kl_coef * penalties).float()
    return _advantages_from(part, algorithm, penalised, groups), float(penalties.mean())


def _with_rewards(part: Batch, policy: Backend, *columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return reward, group and sums of columns [n] for each sample of the step, float64 [N] each.

    A collective.
    """
    if part.rows is None:
        raise RuntimeError("the part does not say which samples of the step it has")
    first = _first_rows(part.rows)
    given = torch.stack([part.rewards * first, part.group_index * first, *columns], dim=1)
    return _over_replicas(given, part, policy).unbind(1)


def _advantages_from(part: Batch, algorithm: Algorithm, rewards: torch.Tensor, groups: torch.Tensor) -> Batch:
    """Return the part with advantages computed from rewards, float32 [N], of samples in groups [N]."""
    advantages = algorithm.advantages(rewards, groups.long())[part.rows][part.sample_index]
    return dataclasses.replace(part, advantages=torch.where(part.loss_mask, advantages, 0.0))


def _distilled(
    part: Batch, policy: Backend, teacher_logprobs: torch.Tensor, coef: float
) -> tuple[Batch, float | None]:
    """Add the teacher's advantages; also return the mean of k1 over the step's trained tokens.

    A_t = A_i - coef (log pi_behaviour(o_t) - log pi_teacher(o_t))
    """
    k1 = token_k1(part, teacher_logprobs, part.loss_mask)
    total = float(_over_replicas(_sums_of_samples(k1, part)[:, None], part, policy).sum())
    trained = part.totals.trained_tokens
    distilled = dataclasses.replace(part, advantages=part.advantages - coef * k1)
    return distilled, total / trained if trained else None


def token_k1(part: Batch, logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return log pi_behaviour - `logprobs` where `mask` is, 0 elsewhere, float32 [t]."""
    return torch.where(mask, part.behaviour_logprobs - logprobs, 0.0)


def _sums_of_samples(values: torch.Tensor, part: Batch) -> torch.Tensor:
    """Return the sum of `values` [t] over each sample's tokens, float64 [n]."""
    sums = torch.zeros(len(part.group_index), dtype=torch.float64)
    return sums.index_add_(0, part.sample_index, values.double())


def _first_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return 1 for the first row of each sample and 0 for its other branches, float64 [n]."""
    places = {row: i for i, row in reversed(list(enumerate(rows.tolist())))}
    first = torch.zeros(len(rows), dtype=torch.float64)
    first[list(places.values())] = 1.0
    return first


def _over_replicas(values: torch.Tensor, part: Batch, policy: Backend) -> torch.Tensor:
    """Return the values of all samples of the step, float64 [N, C], summed over their branches, [n, C].

    A collective. A sample's values come from one rank, so they are bit-identical in every layout.
    """
    if part.rows is None:
        raise RuntimeError("the part does not say which samples of the step it has")
    whole = torch.zeros(part.totals.samples, values.shape[1], dtype=torch.float64)
    return sum_replicas(whole.index_add_(0, part.rows, values), policy.replicas)
