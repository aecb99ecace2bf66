"""Tests group advantages against hand-computed values, and that groups do not affect each other; and
DAPO's punishment of long samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.algorithms.naive import gae
from trainer.functional.advantages import (
    generalized_advantages,
    group_centred,
    group_normalised,
    overlong_punishment,
    terminal_rewards,
)


def test_group_normalised_by_hand() -> None:
    # group 0: mean 1, std 1; group 1: mean 2, std 0
    rewards, groups = torch.tensor([0.0, 2.0, 2.0, 2.0]), torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(group_normalised(rewards, groups, 1.0), torch.tensor([-0.5, 0.5, 0.0, 0.0]))


def test_group_centred_by_hand() -> None:
    rewards, groups = torch.tensor([0.0, 3.0, 1.0, 5.0]), torch.tensor([0, 1, 0, 0])
    torch.testing.assert_close(group_centred(rewards, groups), torch.tensor([-2.0, 0.0, -1.0, 3.0]))


def test_equal_rewards_and_single_samples_have_no_advantage() -> None:
    rewards, groups = torch.tensor([0.1, 0.1, 0.1, 7.0]), torch.tensor([0, 0, 0, 1])
    assert group_normalised(rewards, groups, 1e-4).abs().max() < 1e-6
    assert group_normalised(rewards, groups, 1e-4).dtype == torch.float32


@given(st.lists(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=6), min_size=1, max_size=5))
def test_advantages_of_a_group_sum_to_zero_and_ignore_other_groups(groups: list[list[float]]) -> None:
    rewards = torch.tensor([r for group in groups for r in group])
    index = torch.tensor([i for i, group in enumerate(groups) for _ in group])
    for function in (group_centred, lambda r, g: group_normalised(r, g, 1e-2)):
        together = function(rewards, index)
        for i, group in enumerate(groups):
            alone = function(torch.tensor(group), torch.zeros(len(group), dtype=torch.int64))
            torch.testing.assert_close(together[index == i], alone)
            assert abs(float(together[index == i].double().sum())) < 1e-3


@pytest.mark.parametrize(
    ("length", "punishment"),
    [(0, 0), (16_384, 0), (16_385, -1 / 4096), (17_408, -0.25), (18_432, -0.5), (20_480, -1), (20_481, -1)],
)
def test_punishment_is_that_of_equation_13(length: int, punishment: float) -> None:
    """DAPO, section 4.1: 16,384 tokens are expected, and 4,096 more are the buffer."""
    found = overlong_punishment(torch.tensor([length]), 20_480, 4096)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([punishment], dtype=torch.float32))


def test_a_buffer_of_one_token_punishes_the_limit_alone() -> None:
    assert overlong_punishment(torch.tensor([6, 7, 8, 9]), 8, 1).tolist() == [0, 0, -1, -1]


NUMBERS = st.floats(-3, 3, width=32)
SHARES = st.floats(0, 1)
TOKENS = st.lists(st.tuples(st.booleans(), NUMBERS, NUMBERS), min_size=1, max_size=9)


@given(st.lists(TOKENS, min_size=1, max_size=4), SHARES, SHARES)
def test_advantages_are_the_sums_of_the_paper_over_sampled_tokens(
    samples: list[list[tuple[bool, float, float]]], gamma: float, gae_lambda: float
) -> None:
    sampled, rewards, values = map(torch.tensor, zip(*(token for s in samples for token in s), strict=True))
    sample = torch.repeat_interleave(torch.tensor([len(s) for s in samples]))
    found = generalized_advantages(rewards, values, sampled, sample, gamma=gamma, gae_lambda=gae_lambda)
    expected = []
    for tokens in samples:
        chosen = iter(gae([r for s, r, _ in tokens if s], [v for s, _, v in tokens if s], gamma, gae_lambda))
        expected += [next(chosen) if is_sampled else 0.0 for is_sampled, _, _ in tokens]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=1e-9)


def test_lambda_1_is_the_return_less_the_value_and_lambda_0_the_next_step() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.25, 0.75])
    sampled, sample = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    whole, one = (
        generalized_advantages(rewards, values, sampled, sample, gamma=1.0, gae_lambda=gae_lambda).tolist()
        for gae_lambda in (1.0, 0.0)
    )
    assert whole == pytest.approx([0.5, 0.75, 0.25])
    assert one == pytest.approx([-0.25, 0.5, 0.25])


def test_a_samples_reward_is_at_its_last_sampled_token() -> None:
    sampled = torch.tensor([0, 1, 1, 0, 0, 0, 1], dtype=torch.bool)
    sample = torch.tensor([0, 0, 0, 0, 1, 2, 2])
    found = terminal_rewards(torch.tensor([1.0, 5.0, -2.0]), sampled, sample)
    assert found.tolist() == [0, 0, 1, 0, 0, 0, -2]


def test_nothing_is_estimated_where_nothing_was_sampled() -> None:
    nothing = torch.zeros(0)
    for sampled in (torch.zeros(0, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)):
        values, sample = torch.ones(len(sampled)), torch.zeros(len(sampled), dtype=torch.int64)
        found = generalized_advantages(values, values, sampled, sample, gamma=1.0, gae_lambda=1.0)
        assert not found.any()
        assert not terminal_rewards(nothing if not len(sampled) else torch.ones(1), sampled, sample).any()
