"""Tests advantages of single tokens against sums from the paper, and what they skip."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.algorithms.naive import gae
from trainer.functional.gae import generalized_advantages, terminal_rewards

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
