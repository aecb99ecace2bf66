"""Tests group advantages against hand-computed values, and that groups do not affect each other; and
DAPO's punishment of long samples."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.functional.advantages import group_centred, group_normalised, overlong_punishment


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
