"""Tests the experts of gpt-oss against transformers' own."""

import torch
import transformers
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from trainer.megatron.layers.experts.clamped import clamped_swiglu


def test_the_activation_is_bounded_as_that_of_transformers() -> None:
    theirs = GptOssExperts(transformers.GptOssConfig(hidden_size=4, intermediate_size=3, num_local_experts=1))
    x = torch.randn(50, 2 * 3, generator=torch.Generator().manual_seed(0)) * 10
    assert (x.abs() > theirs.limit).any()
    found = clamped_swiglu(x, theirs.limit, theirs.alpha)
    torch.testing.assert_close(found, theirs._apply_gate(x), atol=1e-6, rtol=1e-6)
