"""Tests that attention that is joined of parts is the whole one, with its gradients."""

import pytest
import torch

from trainer.layers.attention.kernels import Kernel, by_segments
from trainer.layers.attention.terms import AttentionTerms
from trainer.megatron.layers.attention.rotary import Rotary, packed_sequences

LENGTHS = [300, 280, 65, 64, 3, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 40])
def test_sinks_on_the_fused_kernel_are_those_by_segments(fused: Kernel, window: int) -> None:
    torch.manual_seed(0)
    shapes = [(sum(LENGTHS), heads, 64) for heads in (8, 2, 2)]
    inputs = [torch.randn(shape, device="cuda") for shape in shapes] + [torch.randn(8, device="cuda") * 2]
    sequences = packed_sequences(
        LENGTHS, [Rotary(torch.ones(32, device="cuda"))], torch.bfloat16, segmented=True
    )
    upstream = torch.randn(shapes[0], device="cuda")
    terms = AttentionTerms(scale=0.2, window=window, sinks=True)
    results = []
    for kernel, dtype in ((fused, torch.bfloat16), (by_segments, torch.float32)):
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in inputs]
        out = kernel(*leaves[:3], sequences, terms, leaves[3])
        results.append([out, *torch.autograd.grad(out, leaves, upstream.to(dtype))])
    for found, expected in zip(*results, strict=True):
        scale = expected.abs().max()
        torch.testing.assert_close(found.float() / scale, expected / scale, atol=2e-2, rtol=0)
