"""Tests M2PO's trust region by hand: which tokens leave it, and the cap that brings them back."""

import math

import pytest
import torch

from trainer.functional.corrections import leaves_region, log_ratio_limit


def test_only_tokens_that_move_further_away_leave_the_region() -> None:
    log_ratio = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.0, 0.5])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1e-9])
    assert leaves_region(log_ratio, advantages).tolist() == [True, False, False, True, False, False]


def test_the_cap_keeps_the_second_moment_within_the_budget() -> None:
    moved = torch.tensor([0.1, 0.8, 0.3, 0.5])
    # capped from 0.5 on: (0.01 + 0.09 + 2 tau^2) / 4 = 0.1
    assert log_ratio_limit(moved.square(), 0.1) == pytest.approx(math.sqrt(0.15))
    # every one is capped: tau^2 = 0.0025
    assert log_ratio_limit(moved.square(), 0.0025) == pytest.approx(0.05)
    # the mean is 0.2475
    assert log_ratio_limit(moved.square(), 0.25) == math.inf
    assert log_ratio_limit(moved[:0], 0.1) == math.inf
