"""A transformers model computes what its configuration says."""

import torch
from transformers import GptOssConfig, GptOssForCausalLM

from protocol.device.hf_models import apply_config


def test_experts_of_gpt_oss_are_clamped_where_the_configuration_says() -> None:
    config = GptOssConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=2,
        swiglu_limit=0.25,
        swiglu_alpha=2.0,
    )
    model = GptOssForCausalLM(config).float()
    experts = model.model.layers[0].mlp.experts
    experts.limit, experts.alpha = 7.0, 1.702  # as transformers 5.12 sets them
    apply_config(model)
    with torch.no_grad():
        found = experts._apply_gate(torch.full((1, 32), 3.0))
    # gate and up are 0.25 each once they are clamped: (up + 1) * gate * sigmoid(alpha * gate)
    expected = 1.25 * 0.25 / (1 + torch.exp(torch.tensor(-0.5)))
    torch.testing.assert_close(found, expected.expand(1, 16))
