"""Tests the order of rows by expert; `test_layouts` has what ranks exchange."""

import pytest
import torch

from trainer.megatron.layers.experts.dispatch import ExpertOrder

CHOSEN = torch.tensor([[2, 0], [0, 1], [2, 1]])


def test_rows_are_sorted_by_expert_and_come_back_by_token() -> None:
    order = ExpertOrder(CHOSEN, 4)
    x = torch.arange(6, dtype=torch.float64).view(3, 2)
    rows = order.rows_of(x)
    assert order.counts.tolist() == [2, 2, 2, 0]
    assert rows.tolist() == x[[0, 1, 1, 2, 0, 2]].tolist()
    weights = torch.tensor([[1.0, 2.0], [3.0, 5.0], [7.0, 11.0]], dtype=torch.float64)
    assert torch.equal(order.combine(rows, weights), x * weights.sum(1, keepdim=True))


def test_the_gradient_of_a_token_is_the_sum_over_its_rows() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    order = ExpertOrder(CHOSEN, 4)
    order.combine(order.rows_of(x).tanh(), weights).sum().backward()
    slopes = 1 - x.detach().tanh().square()
    torch.testing.assert_close(x.grad, slopes * weights.detach().sum(1, keepdim=True))
    torch.testing.assert_close(weights.grad, x.detach().tanh().sum(1, keepdim=True).expand(3, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_compute_what_plain_torch_does_in_float64(dtype: torch.dtype) -> None:
    tokens, hidden, copies, experts = 77, 1500, 3, 5
    chosen = torch.stack([torch.randperm(experts)[:copies] for _ in range(tokens)])
    given = torch.randn(tokens, hidden), torch.rand(tokens, copies), torch.randn(tokens, hidden)
    found = []
    for device, precision in (("cuda", dtype), ("cpu", torch.float64)):
        x, weights = (v.to(dtype).to(device, precision).requires_grad_() for v in given[:2])
        order = ExpertOrder(chosen.to(device), experts)
        combined = order.combine(order.rows_of(x) * 2, weights)
        combined.backward(given[2].to(dtype).to(device, precision))
        assert x.grad is not None
        assert weights.grad is not None
        found.append([v.double().cpu() for v in (combined.detach(), x.grad, weights.grad)])
    for ours, exact in zip(*found, strict=True):
        assert (ours - exact).norm() <= 4 * torch.finfo(dtype).eps * exact.norm()
