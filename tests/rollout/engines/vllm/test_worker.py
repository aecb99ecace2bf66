"""Tests what vLLM's worker refuses to stage over."""

import pytest
import torch

from protocol.errors import EngineError
from rollout.engines.vllm.worker import check_layout


def test_experts_that_vllm_repacks_are_refused() -> None:
    dense = [("model.layers.0.mlp.gate_up_proj.weight", torch.empty(1))]
    check_layout(dense)
    with pytest.raises(EngineError, match=r"repacks experts on a CPU \(model.*w13_weight\)"):
        check_layout([*dense, ("model.layers.0.mlp.experts.w13_weight", torch.empty(1))])
    check_layout([("model.layers.0.mlp.experts.w13_weight", torch.empty(1, device="meta"))])
