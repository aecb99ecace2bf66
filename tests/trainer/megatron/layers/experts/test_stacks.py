"""Tests that both ways to multiply the rows of experts give the same products and gradients."""

from collections.abc import Callable

import pytest
import torch

from trainer.megatron.layers.experts.stacks import grouped, one_by_one

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def products(
    compute: Product, counts: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs, and gradients of rows and weights."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(int(counts.sum()), 64, generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(len(counts), 48, 64, generator=generator).to(dtype).requires_grad_()
    output = compute(rows, weights, counts)
    output.backward(torch.randn(output.shape, generator=generator).to(dtype))
    assert rows.grad is not None
    assert weights.grad is not None
    return output.detach(), rows.grad, weights.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [[5, 0, 13, 7], [0, 0]])
def test_a_grouped_product_equals_one_for_each_expert(dtype: torch.dtype, counts: list[int]) -> None:
    found, expected = (products(way, torch.tensor(counts), dtype) for way in (grouped, one_by_one))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)
