"""Tests which tokens get a critic's advantages, and what these are whitened over."""

from dataclasses import replace

import pytest
import torch

from protocol.messages import ScoredRollout
from protocol.tensors import Array
from tests.protocol.samples import BRANCHED
from tests.trainer.groups import GroupSpec, SampleSpec, batch_of, by_sample, scored, whole
from tests.trainer.roles.ppo_steps import ALGORITHM, command
from trainer.algorithms import make_algorithm
from trainer.batch import Batch
from trainer.config import AlgorithmConfig
from trainer.roles.advantages import _penalised, token_rewards, whitened, with_advantages, with_whitened
from trainer.step.plan import plan_step
from trainer.step.train_command import plan_command

ALONE = ((0,),)


@pytest.fixture
def batch() -> Batch:
    return whole(plan_command(command(2), make_algorithm(ALGORITHM)))


def values_of(batch: Batch) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(len(batch.tokens), generator=generator) * batch.sampled_mask


def test_advantages_of_trained_tokens_have_mean_0_and_deviation_1(batch: Batch) -> None:
    made = with_advantages(batch, values_of(batch), replace(ALGORITHM, advantage_eps=1e-8), ALONE)
    trained = made.advantages[batch.loss_mask]
    assert trained.mean().item() == pytest.approx(0, abs=1e-6)
    assert trained.std(unbiased=False).item() == pytest.approx(1, abs=1e-6)
    assert not made.advantages[~batch.loss_mask].any()


def test_returns_are_not_whitened(batch: Batch) -> None:
    values = values_of(batch)
    made, plain = (
        with_advantages(batch, values, replace(ALGORITHM, whiten_advantages=white), ALONE)
        for white in (True, False)
    )
    assert made.returns is not None
    assert plain.returns is not None
    assert torch.equal(made.returns, plain.returns)
    trained = batch.loss_mask
    torch.testing.assert_close((plain.returns - values)[trained], plain.advantages[trained])
    assert not made.returns[~batch.sampled_mask].any()


def test_rewards_and_values_pass_through_tokens_over_the_bound(batch: Batch) -> None:
    late = batch.sampled_mask & ~batch.loss_mask
    assert late.any()
    config = replace(ALGORITHM, gamma=1.0, gae_lambda=1.0, whiten_advantages=False)
    made = with_advantages(batch, values_of(batch), config, ALONE)
    assert made.returns is not None
    for returns, sampled, reward in zip(
        by_sample(batch, made.returns), by_sample(batch, batch.sampled_mask), batch.rewards, strict=True
    ):
        found = [value for value, is_sampled in zip(returns, sampled, strict=True) if is_sampled]
        assert found == pytest.approx([float(reward)] * len(found), abs=1e-5)


def test_a_part_without_samples_has_no_advantages(batch: Batch) -> None:
    part = batch.select(torch.zeros(0, dtype=torch.int64))
    made = with_advantages(part, torch.zeros(0), ALGORITHM, ALONE)
    assert [len(made.advantages), len(token_rewards(part, ALGORITHM))] == [0, 0]


def test_reinforce_plus_plus_whitens_over_tokens_by_hand() -> None:
    """Four samples of 10 tokens with reward 1, four of 90 with 0: mean 0.1, deviation 0.3."""
    long, short = SampleSpec([5] * 90, [0] * 90, 0.0), SampleSpec([5] * 10, [0] * 10, 1.0)
    config = AlgorithmConfig(name="reinforce_plus_plus", advantage_eps=1e-8)
    groups = [(scored(GroupSpec(n, samples=[row])), 0) for n, row in enumerate([long, short] * 4)]
    batch = batch_of(groups, step=0, algorithm=make_algorithm(config))
    advantages = with_whitened(batch, config, ALONE).advantages[batch.loss_mask]
    assert sorted(set(advantages.tolist())) == pytest.approx([-1 / 3, 3.0])
    assert float(advantages.sum()) == pytest.approx(0, abs=1e-3)


def test_reinforce_plus_plus_penalises_a_token_for_itself_and_later_ones_by_hand() -> None:
    """Penalties of 0.1 a sampled token: 0.3, 0.2, - and 0.1 are subtracted from 1, and none of it from 0."""
    rows = [SampleSpec([5, 6, 7, 8], [0] * 4, 1.0, mask=[1, 1, 0, 1]), SampleSpec([5], [0], 0.0)]
    config = AlgorithmConfig(name="reinforce_plus_plus", kl_coef=0.5, use_kl_in_reward=True)
    batch = batch_of([(scored(GroupSpec(samples=rows)), 0)], step=0, algorithm=make_algorithm(config))
    gap = torch.tensor([0.0, 0.0, 0.2, 0.2, 9.0, 0.2, 0.0, 0.0, 0.0])
    batch = replace(batch, reference_logprobs=batch.behaviour_logprobs - gap)
    values = torch.tensor([0.7, 0.8, 0.9, 0.0])
    expected = (values - values.mean()) / (values.std(correction=0) + config.advantage_eps)
    found = with_whitened(batch, config, ALONE).advantages[batch.loss_mask]
    torch.testing.assert_close(found, expected)


def test_nothing_is_whitened_where_nothing_is_trained() -> None:
    values = torch.ones(3, dtype=torch.float64)
    assert not whitened(values, torch.zeros(3, dtype=torch.bool), 1e-4, ALONE).any()


def test_a_penalty_in_the_reward_follows_each_sampled_token(batch: Batch) -> None:
    config = replace(ALGORITHM, use_kl_in_reward=True, kl_coef=0.5)
    behind = replace(batch, reference_logprobs=batch.behaviour_logprobs - 0.2)
    plain, penalised = token_rewards(behind, ALGORITHM), token_rewards(behind, config)
    torch.testing.assert_close(plain - penalised, 0.1 * batch.sampled_mask.double(), atol=1e-6, rtol=0)


class OneReplica:
    """Backend of one rank, of which only the replicas are asked."""

    replicas = ((0,),)


def test_a_penalty_is_that_of_all_branches_of_a_sample() -> None:
    algorithm = make_algorithm(AlgorithmConfig(kl_coef=0.25, use_kl_in_reward=True))
    scored = ScoredRollout(rollout=BRANCHED, rewards=Array.of([1.0, 0.0], "float32"))
    made = plan_step([(scored, 2)], step=5, algorithm=algorithm)
    part = made.part([0, 1, 2])
    part = replace(part, reference_logprobs=torch.full_like(part.behaviour_logprobs, -1.0))
    penalised, mean = _penalised(part, OneReplica(), algorithm)  # type: ignore[arg-type]
    # log-probabilities -0.5, -1.25 and -0.25 of the first sample, -2 of the second, less -1 each
    expected = algorithm.advantages(torch.tensor([1 - 0.25 * 1.0, 0.25]), torch.tensor([0, 0]))
    assert mean == 0.0
    found = penalised.advantages[penalised.loss_mask]
    torch.testing.assert_close(found, expected[torch.tensor([0, 0, 0, 1])])
