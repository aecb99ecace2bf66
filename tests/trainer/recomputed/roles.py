"""Computes the advantage of every token from rewards and the opinions of other models, from the papers."""

from tests.trainer.algorithms import naive
from tests.trainer.recomputed.records import NaiveBatch
from trainer.config import AlgorithmConfig

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")


def with_a_teacher(
    config: AlgorithmConfig, batch: NaiveBatch, teacher: list[float] | None
) -> tuple[dict[int, float], dict[str, float]]:
    """Return the advantages of trained tokens where there is no critic, and what is reported of them.

    A penalty in the reward is that of all sampled tokens of a sample (Ziegler et al. 2019); a teacher's
    log-probabilities, [t], give each token its own part (Agarwal et al. 2023).
    """
    rewards, found = naive.of_samples(batch, batch.rewards.tolist()), {}  # type: ignore[arg-type]
    if config.use_kl_in_reward:
        sums = penalties_of_samples(batch)
        rewards = [reward - config.kl_coef * total for reward, total in zip(rewards, sums, strict=True)]
        found["reward_kl_k1"] = naive.mean(sums)
    if config.name in WHITENED:
        return with_whitening(config, batch), found
    groups = naive.of_samples(batch, batch.group_index.tolist())  # type: ignore[arg-type]
    scores = naive.advantages(config, rewards, groups)
    owners = naive.owners(batch)  # type: ignore[arg-type]
    rows = zip(owners, batch.trained, strict=True)
    advantages = {token: scores[sample] for sample, tokens in rows for token in tokens}
    if teacher is not None and advantages:
        gaps = {token: batch.behaviour_logprobs[token].item() - teacher[token] for token in advantages}
        found["teacher_kl_k1"] = naive.mean(list(gaps.values()))
        advantages = {token: score - config.opd_kl_coef * gaps[token] for token, score in advantages.items()}
    return advantages, found


def with_whitening(config: AlgorithmConfig, batch: NaiveBatch) -> dict[int, float]:
    """Return REINFORCE++'s advantages of trained tokens (Hu et al. 2025, section 3).

    A token's penalty is that of all sampled tokens of its row from it on.
    """
    gaps = penalties(batch) if config.use_kl_in_reward else {}
    rewards = naive.of_samples(batch, batch.rewards.tolist())  # type: ignore[arg-type]
    groups = naive.of_samples(batch, batch.group_index.tolist())  # type: ignore[arg-type]
    scores = naive.advantages(config, rewards, groups)
    returns: dict[int, float] = {}
    owners = naive.owners(batch)  # type: ignore[arg-type]
    for sample, sampled, trained in zip(owners, batch.sampled, batch.trained, strict=True):
        for token in trained:
            later = sum(gaps.get(other, 0.0) for other in sampled if other >= token)
            returns[token] = scores[sample] - config.kl_coef * later
    return naive.whitened(config, returns)


def with_a_critic(
    config: AlgorithmConfig, batch: NaiveBatch, values: dict[int, float]
) -> tuple[dict[int, float], dict[int, float], dict[str, float]]:
    """Return the advantages of trained tokens, the returns of sampled ones, and what is reported of them.

    Schulman et al. 2015 and 2017; `values` are those of the states in which the tokens were sampled. Every
    branch of a sample ends with its reward.
    """
    gaps = penalties(batch) if config.use_kl_in_reward else {}
    advantages: dict[int, float] = {}
    for tokens, reward in zip(batch.sampled, batch.rewards.tolist(), strict=True):
        rewards = [-config.kl_coef * gaps.get(token, 0.0) for token in tokens]
        rewards[-1] += reward
        own = naive.gae(rewards, [values[token] for token in tokens], config.gamma, config.gae_lambda)
        advantages |= dict(zip(tokens, own, strict=True))
    returns = {token: score + values[token] for token, score in advantages.items()}
    trained = {token: advantages[token] for tokens in batch.trained for token in tokens}
    if config.whiten_advantages:
        trained = naive.whitened(config, trained)
    found = {"reward_kl_k1": naive.mean(penalties_of_samples(batch))} if gaps else {}
    return trained, returns, found


def penalties_of_samples(batch: NaiveBatch) -> list[float]:
    """Return the sum of the penalties of each sample's tokens, in all of its branches."""
    gaps = penalties(batch)
    sums = [sum(gaps[token] for token in tokens) for tokens in batch.sampled]
    return naive.sums_of_samples(batch, sums)  # type: ignore[arg-type]


def penalties(batch: NaiveBatch) -> dict[int, float]:
    """Return log pi_engine - log pi_reference of every sampled token."""
    assert batch.reference_logprobs is not None
    gaps = (batch.behaviour_logprobs - batch.reference_logprobs).tolist()
    return {token: gaps[token] for tokens in batch.sampled for token in tokens}
