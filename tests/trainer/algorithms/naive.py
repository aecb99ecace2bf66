"""Computes the loss of a step from the papers, a sample and a token at a time, in plain Python over float64.

Nothing of the project is used but the batch; gradients are torch's. A row of a batch is a sample, or a branch
of one.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from trainer.batch import Batch
from trainer.config import AlgorithmConfig

TOKEN_MEAN = (
    "dapo", "cispo", "m2po", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline",
    "on_policy_distillation", "sft",
)  # fmt: skip


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def deviation(values: list[float]) -> float:
    return math.sqrt(mean([(value - mean(values)) ** 2 for value in values]))


def owners(batch: Batch) -> list[int]:
    """Return the sample of each row, from 0."""
    rows = list(range(len(batch.lengths))) if batch.rows is None else batch.rows.tolist()
    samples = sorted(set(rows))
    return [samples.index(row) for row in rows]


def of_samples(batch: Batch, values: list[Any]) -> list[Any]:
    """Return what the first row of each sample has."""
    owner = owners(batch)
    return [values[owner.index(sample)] for sample in range(max(owner) + 1)]


def sums_of_samples(batch: Batch, values: list[Any]) -> list[Any]:
    """Return the sum of what the rows of each sample have."""
    owner = owners(batch)
    return [
        sum(value for value, own in zip(values, owner, strict=True) if own == sample)
        for sample in range(max(owner) + 1)
    ]


def shares_of_rows(batch: Batch) -> list[float]:
    """Return the inputs of each row by those of all rows of its sample."""
    inputs = [length - 1 for length in batch.lengths.tolist()]
    sums = sums_of_samples(batch, inputs)
    return [own / sums[sample] for own, sample in zip(inputs, owners(batch), strict=True)]


def advantages(config: AlgorithmConfig, rewards: list[float], groups: list[int]) -> list[float]:
    """Return the advantage of each sample."""
    others = [
        [reward for j, reward in enumerate(rewards) if groups[j] == groups[i] and j != i]
        for i in range(len(rewards))
    ]
    whole = [[*rest, reward] for rest, reward in zip(others, rewards, strict=True)]
    centred = [reward - mean(group) for reward, group in zip(rewards, whole, strict=True)]
    eps = config.advantage_eps
    if config.name in ("dr_grpo", "reinforce_plus_plus_baseline"):  # the latter before the whitening
        return centred
    if config.name == "on_policy_distillation":  # beside the teacher's
        return [config.opd_reward_coef * value for value in centred]
    if config.name in ("ppo", "reinforce_plus_plus"):  # before a critic, or the whitening
        return rewards
    if config.name == "rloo":
        return [reward - mean(rest) if rest else 0.0 for reward, rest in zip(rewards, others, strict=True)]
    return [value / (deviation(group) + eps) for value, group in zip(centred, whole, strict=True)]


def gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Schulman et al. 2015, eq. 16: the sum of (gamma lambda)^l delta_(t + l)."""
    after = [*values, 0.0][1:]
    deltas = [r + gamma * later - v for r, later, v in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * lam) ** (late - t) * deltas[late] for late in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


def token_weight(config: AlgorithmConfig, sampled: list[int], sample: int) -> float:
    """Return what a token's loss is multiplied by; `sampled` counts the sampled tokens of every sample."""
    if config.name == "dr_grpo":
        return 1 / (len(sampled) * (config.length_normalizer or max(sampled)))
    if config.name in TOKEN_MEAN:
        return 1 / sum(sampled)
    return 1 / len(sampled) if config.name == "rloo" else 1 / (len(sampled) * sampled[sample])


def policy_losses(
    config: AlgorithmConfig,
    logprobs: list[torch.Tensor],
    old: list[torch.Tensor],
    scores: list[float],
    cap: float,
) -> list[torch.Tensor]:
    """Return the loss of each trained token of a row; `scores` are their advantages, `cap` is M2PO's."""
    ratios = [torch.exp(new - before) for new, before in zip(logprobs, old, strict=True)]
    low, high = edges(config, cap)
    if config.name == "gspo":
        ratios = [torch.stack(ratios).prod() ** (1 / len(ratios))] * len(ratios)
    if config.name == "cispo":
        weights = [min(max(ratio.item(), low), high) for ratio in ratios]
        return [-w * score * new for w, score, new in zip(weights, scores, logprobs, strict=True)]
    return [
        -torch.minimum(ratio * score, ratio.clamp(low, high) * score)
        for ratio, score in zip(ratios, scores, strict=True)
    ]


def at_level(ratios: list[float], level: str) -> list[float]:
    product = math.prod(ratios)
    whole = {"sequence": product, "geometric": product ** (1 / len(ratios))}
    return ratios if level == "token" else [whole[level]] * len(ratios)


KL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "k1": lambda log_q: -log_q,
    "k2": lambda log_q: log_q**2 / 2,
    "k3": lambda log_q: torch.exp(log_q) - log_q - 1,
}


def clip_of(
    config: AlgorithmConfig, batch: Batch, logprobs: list[float], of_tokens: dict[int, float]
) -> float:
    """Return M2PO's cap of |log ratio| for an update, by bisection; `logprobs` [t] are the present ones.

    Of tokens with A > 0 whose ratio is above 1, and of those with A < 0 whose ratio is below it, the mean
    square of the capped log ratios is the threshold.
    """
    leaving = []
    for token in batch.loss_mask.nonzero()[:, 0].tolist():
        gap = logprobs[token] - batch.behaviour_logprobs[token].item()
        if (of_tokens[token] > 1e-6 and gap > 0) or (of_tokens[token] < -1e-6 and gap < 0):
            leaving.append(abs(gap))
    if not leaving or mean([gap**2 for gap in leaving]) <= config.second_moment_threshold:
        return math.inf
    low, high = 0.0, max(leaving)
    for _ in range(100):
        middle = (low + high) / 2
        fits = mean([min(gap, middle) ** 2 for gap in leaving]) <= config.second_moment_threshold
        low, high = (middle, high) if fits else (low, middle)
    return low


def edges(config: AlgorithmConfig, cap: float) -> tuple[float, float]:
    """Return what a ratio is clipped to: of M2PO the wider of the cap and the least clip."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    return (min(low, math.exp(-cap)), max(high, math.exp(cap))) if config.name == "m2po" else (low, high)


def whitened(config: AlgorithmConfig, of_tokens: dict[int, float]) -> dict[int, float]:
    """Return the advantages of tokens, less their mean and divided by their deviation."""
    if not of_tokens:
        return {}
    center = mean(list(of_tokens.values()))
    scale = deviation(list(of_tokens.values())) + config.advantage_eps
    return {token: (value - center) / scale for token, value in of_tokens.items()}


def proximal(
    config: AlgorithmConfig, batch: Batch, token: int, new: torch.Tensor, started: torch.Tensor
) -> torch.Tensor:
    """Return log pi_proximal of a token."""
    engine = batch.behaviour_logprobs[token].double()
    if config.proximal_policy == "start":
        return started
    before, now = batch.versions[token].item(), batch.step + 1
    return engine + (batch.step - before) / (now - before) * (new.detach() - engine)


def step_loss(
    config: AlgorithmConfig,
    batch: Batch,
    logprobs: torch.Tensor,
    entropy: torch.Tensor,
    scores: list[float] | None = None,
    cap: float = math.inf,
    of_tokens: dict[int, float] | None = None,
) -> torch.Tensor:
    """Return the loss of an update.

    Args:
        config: the recipe.
        batch: all samples of the update.
        logprobs: [t], float64; so is `entropy`.
        entropy: of the distribution that each token was drawn from.
        scores: advantages of the samples, whose branches share them; None: the batch is whole groups, from
            whose rewards they follow.
        cap: M2PO's of |log ratio|.
        of_tokens: advantages of the trained tokens; None: those of their samples.
    """
    counts = [int(mask.sum()) for mask in batch.sampled_mask.split(batch.lengths.tolist())]
    sampled = sums_of_samples(batch, counts)
    rewards, groups = (of_samples(batch, values.tolist()) for values in (batch.rewards, batch.group_index))
    scores = scores or advantages(config, rewards, groups)
    total = logprobs.new_zeros(())
    for row, sample in enumerate(owners(batch)):
        span = range(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        tokens = [token for token in span if batch.loss_mask[token]]
        if not tokens:
            continue
        new = [logprobs[token] for token in tokens]
        if config.name == "sft":
            total = total - sum(new) * token_weight(config, sampled, sample)
            continue
        engine = [batch.behaviour_logprobs[token].double() for token in tokens]
        started = [value.detach() for value in new]
        if batch.start_logprobs is not None:
            started = [batch.start_logprobs[token].double() for token in tokens]
        old = engine
        if batch.decoupled:
            rows = zip(tokens, new, started, strict=True)
            old = [proximal(config, batch, token, now, start) for token, now, start in rows]
        own = [scores[sample] if of_tokens is None else of_tokens[token] for token in tokens]
        losses = policy_losses(config, new, old, own, cap)
        weights = [math.exp(now.item() - then.item()) for now, then in zip(old, engine, strict=True)]
        gaps = [math.exp(now.item() - then.item()) for now, then in zip(started, engine, strict=True)]
        for place, (token, loss) in enumerate(zip(tokens, losses, strict=True)):
            if batch.decoupled and config.importance_cap:
                loss = loss * min(at_level(weights, config.importance_level)[place], config.importance_cap)
            if config.rejection_level:
                gap = at_level(gaps, config.rejection_level)[place]
                loss = loss * (config.rejection_low <= gap <= config.rejection_high)
            loss = loss - config.entropy_coef * entropy[token]
            if batch.reference_logprobs is not None and not config.use_kl_in_reward:
                log_q = batch.reference_logprobs[token].double() - new[place]
                loss = loss + config.kl_coef * KL[config.kl_estimator](log_q)
            total = total + loss * token_weight(config, sampled, sample)
    return total
