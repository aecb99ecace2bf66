"""A transformers model computes what its configuration says."""

import torch

from protocol.device.hf_models import apply_config
from tests.contracts.engine_models import tiny_gpt_oss


def test_experts_of_gpt_oss_are_clamped_where_the_configuration_says() -> None:
    model = tiny_gpt_oss(1)
    model.config.swiglu_limit, model.config.swiglu_alpha = 0.25, 2.0
    experts = model.model.layers[0].mlp.experts
    experts.limit, experts.alpha = 7.0, 1.702  # as transformers 5.12 sets them
    apply_config(model)
    with torch.no_grad():
        found = experts._apply_gate(torch.full((1, 4), 3.0))
    # gate and up are 0.25 each once they are clamped: (up + 1) * gate * sigmoid(alpha * gate)
    expected = 1.25 * 0.25 / (1 + torch.exp(torch.tensor(-0.5)))
    torch.testing.assert_close(found, expected.expand(1, 2))
