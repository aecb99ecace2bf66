"""Tests DAPO's soft overlong punishment with the numbers of its paper."""

import pytest
import torch

from trainer.functional.overlong import overlong_punishment


@pytest.mark.parametrize(
    ("length", "punishment"),
    [(0, 0), (16_384, 0), (16_385, -1 / 4096), (17_408, -0.25), (18_432, -0.5), (20_480, -1), (20_481, -1)],
)
def test_punishment_is_that_of_equation_13(length: int, punishment: float) -> None:
    """Section 4.1: 16,384 tokens are expected, and 4,096 more are the buffer."""
    found = overlong_punishment(torch.tensor([length]), 20_480, 4096)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([punishment], dtype=torch.float32))


def test_a_buffer_of_one_token_punishes_the_limit_alone() -> None:
    assert overlong_punishment(torch.tensor([6, 7, 8, 9]), 8, 1).tolist() == [0, 0, -1, -1]
