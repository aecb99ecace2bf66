"""Tests the order of rows by expert; `test_layouts` has what ranks exchange."""

import torch

from trainer.megatron.layers.experts.dispatch import ExpertOrder

CHOSEN = torch.tensor([[2, 0], [0, 1], [2, 1]])


def test_rows_are_sorted_by_expert_and_come_back_by_token() -> None:
    order = ExpertOrder(CHOSEN, 4)
    x = torch.arange(6, dtype=torch.float64).view(3, 2)
    rows = order.rows_of(x)
    assert order.counts.tolist() == [2, 2, 2, 0]
    assert rows.tolist() == x[[0, 1, 1, 2, 0, 2]].tolist()
    assert torch.equal(order.by_token(rows), x[:, None].expand(3, 2, 2))


def test_the_gradient_of_a_token_is_the_sum_over_its_rows() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(3, 2, 2, dtype=torch.float64)
    order = ExpertOrder(CHOSEN, 4)
    (order.by_token(order.rows_of(x).tanh()) * factors).sum().backward()
    expected = (1 - x.detach().tanh().square()) * factors.sum(1)
    torch.testing.assert_close(x.grad, expected)
