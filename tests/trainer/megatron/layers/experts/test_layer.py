"""Tests that both ways to multiply the rows of experts give the same products and gradients."""

from collections.abc import Callable

import pytest
import torch
import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from trainer.megatron.layers.experts.layer import clamped_swiglu, grouped, looped

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
    found, expected = (products(way, torch.tensor(counts), dtype) for way in (grouped, looped))
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_the_activation_is_bounded_as_that_of_transformers() -> None:
    theirs = GptOssExperts(transformers.GptOssConfig(hidden_size=4, intermediate_size=3, num_local_experts=1))
    x = torch.randn(50, 2 * 3, generator=torch.Generator().manual_seed(0)) * 10
    assert (x.abs() > theirs.limit).any()
    found = clamped_swiglu(x, theirs.limit, theirs.alpha)
    torch.testing.assert_close(found, theirs._apply_gate(x), atol=1e-6, rtol=1e-6)
