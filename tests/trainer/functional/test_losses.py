"""Tests ratios, clipped surrogate, importance weights and k3 against hand-computed values."""

import math

import pytest
import torch

from trainer.functional.losses import (
    cispo_loss,
    clipped_surrogate,
    k1_kl,
    k2_kl,
    k3_kl,
    leaves_trust_region,
    log_ratio_limit,
    probability_ratio,
)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def test_probability_ratio_by_hand() -> None:
    torch.testing.assert_close(
        probability_ratio(row(math.log(0.5), -1.0), row(math.log(0.25), -1.0)), row(2.0, 1.0)
    )


def test_probability_ratio_stays_finite() -> None:
    assert torch.isfinite(probability_ratio(row(0.0, -500.0), row(-500.0, 0.0)).float()).all()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.0, 2.0, -2.0, 0.0),
        (1.5, 2.0, -2.6, 1.0),  # min(3, 1.3 * 2)
        (0.5, 2.0, -1.0, 0.0),  # min(1, 1.6): the plain branch
        (1.5, -2.0, 3.0, 0.0),  # min(-3, -2.6)
        (0.5, -2.0, 1.6, 1.0),  # min(-1, -1.6): held at 0.8
        (9.0, 0.0, 0.0, 0.0),
    ],
)
def test_clipped_surrogate_by_hand(ratio: float, advantage: float, loss: float, clipped: float) -> None:
    got = clipped_surrogate(row(ratio), row(advantage), clip_low=0.2, clip_high=0.3)
    assert (got[0].item(), got[1].item()) == (pytest.approx(loss), clipped)


def test_clipped_surrogate_gradient_vanishes_where_clipped() -> None:
    logprobs = row(0.0, 1.0, -1.0, 1.0, -1.0).requires_grad_()
    advantages = row(2.0, 2.0, 2.0, -2.0, -2.0)
    loss, clipped = clipped_surrogate(
        probability_ratio(logprobs, torch.zeros_like(logprobs)), advantages, 0.2, 0.2
    )
    loss.sum().backward()
    # d loss / d logprob = -r A where it is not clipped
    torch.testing.assert_close(logprobs.grad, row(-2.0, 0.0, -2 * math.exp(-1), 2 * math.e, 0.0))
    assert clipped.tolist() == [[0.0, 1.0, 0.0, 0.0, 1.0]]


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    logprobs = row(math.log(0.6), math.log(0.3)).requires_grad_()
    ratio = probability_ratio(logprobs, row(math.log(0.3), math.log(0.3)))
    loss, clipped = cispo_loss(ratio, logprobs, row(1.0, -2.0), 0.2, 0.5)
    assert clipped.flatten().tolist() == [1, 0]
    loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.flatten().tolist() == pytest.approx([-1.5, 2.0])


def test_k1_and_k2_by_hand() -> None:
    logprobs, reference = row(math.log(0.2)), row(math.log(0.5))
    assert k1_kl(logprobs, reference).item() == pytest.approx(math.log(0.4))
    assert k2_kl(logprobs, reference).item() == pytest.approx(math.log(0.4) ** 2 / 2)


def test_k3_kl_by_hand() -> None:
    # q = pi_ref / pi = 1/2: q - log q - 1
    torch.testing.assert_close(
        k3_kl(row(math.log(0.5), -1.0), row(math.log(0.25), -1.0)), row(0.5 + math.log(2) - 1, 0.0)
    )


def test_k3_kl_is_unbiased() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    expected = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * k3_kl(p.log()[None], q.log()[None])[0]).sum(), expected)


def test_losses_pass_gradcheck() -> None:
    logprobs = row(-0.3, -0.9, -2.0).requires_grad_()
    old, advantages = row(-0.4, -0.5, -1.9), row(1.0, -1.0, 0.5)
    assert torch.autograd.gradcheck(
        lambda x: clipped_surrogate(probability_ratio(x, old), advantages, 0.2, 0.2)[0], (logprobs,)
    )
    assert torch.autograd.gradcheck(lambda x: k3_kl(x, old), (logprobs,))


def test_only_tokens_that_move_further_away_leave_the_region() -> None:
    log_ratio = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.0, 0.5])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1e-9])
    assert leaves_trust_region(log_ratio, advantages).tolist() == [True, False, False, True, False, False]


def test_the_cap_keeps_the_second_moment_within_the_budget() -> None:
    moved = torch.tensor([0.1, 0.8, 0.3, 0.5])
    # capped from 0.5 on: (0.01 + 0.09 + 2 tau^2) / 4 = 0.1
    assert log_ratio_limit(moved.square(), 0.1) == pytest.approx(math.sqrt(0.15))
    # every one is capped: tau^2 = 0.0025
    assert log_ratio_limit(moved.square(), 0.0025) == pytest.approx(0.05)
    # the mean is 0.2475
    assert log_ratio_limit(moved.square(), 0.25) == math.inf
    assert log_ratio_limit(moved[:0], 0.1) == math.inf
