"""Tests group advantages against hand-computed values, and that groups do not affect each other."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.functional.advantages import group_centred, group_normalised


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
