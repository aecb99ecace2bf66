"""Tests that experts that vLLM quantises while it loads them are those of the checkpoint."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rollout.engines.vllm.layers.processed import load_biased_experts

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("has_bias", [True, False])
def test_experts_that_are_copied_past_their_loaders_are_loaded(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.quantization.online import moe_base
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing

    class Method(moe_base.OnlineMoEMethodBase):
        """Writes down what it is to quantise."""

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            self.loaded = layer.w13_weight.clone(), layer.w2_weight.clone()

        get_fused_moe_quant_config: Any = None

    Method.__abstractmethods__ = frozenset()
    monkeypatch.setattr(moe_base, "initialize_online_processing", moe_base.initialize_online_processing)
    load_biased_experts()
    method: Any = object.__new__(Method)
    method.moe = SimpleNamespace(has_bias=has_bias, w13_num_shards=2)
    layer: Any = nn.Module()
    layer.quant_method = method
    layer.quant_config = SimpleNamespace(online_quantization_config=None)
    method.create_weights(layer, 4, 8, 16, torch.bfloat16)
    assert layer.w13_weight.is_meta is not has_bias
    if not has_bias:  # left to vLLM, whose loaders these go through
        return
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.full_like(parameter, number + 1))
    finalize_layerwise_processing(layer, SimpleNamespace(dtype=torch.bfloat16))
    assert [float(tensor.float().mean()) for tensor in method.loaded] == [1.0, 2.0]
