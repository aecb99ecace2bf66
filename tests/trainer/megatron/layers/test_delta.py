"""Tests what gated delta nets compute where transformers offers no kernels, as before 5.19."""

import torch

from trainer.megatron.layers.delta import convolved


def test_a_convolution_in_plain_torch_is_the_one_of_transformers() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn

    drawn = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 8, 11, generator=drawn), torch.randn(8, 4, generator=drawn)
    expected = causal_conv1d_fn(x, weight, None, activation="silu")
    torch.testing.assert_close(convolved(x, weight, None, "silu"), expected)
