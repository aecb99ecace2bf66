"""Tests which weights get adapters, and the scaling."""

import math

import pytest

from protocol.errors import SettingsError
from protocol.weights.lora import LoraConfig, adapter_targets

SHAPES = {
    "model.embed_tokens.weight": (32, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.self_attn.qkv_proj.weight": (24, 8),
    "model.layers.0.mlp.gate.weight": (4, 8),
    "model.layers.0.mlp.experts.0.up_proj.weight": (16, 8),
    "model.layers.0.mlp.shared_expert.up_proj.weight": (16, 8),
    "model.layers.1.mlp.up_proj.weight": (16, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (32, 8),
}


def test_all_linear_leaves_out_tables_routers_experts_and_fused_layers() -> None:
    found = adapter_targets(SHAPES, LoraConfig(rank=2))
    assert [target.module for target in found] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    ]


def test_named_layers_are_chosen_wherever_they_are() -> None:
    found = adapter_targets(SHAPES, LoraConfig(rank=2, target_modules=("up_proj", "qkv_proj")))
    assert [target.last for target in found] == ["qkv_proj", "up_proj", "up_proj", "up_proj"]


def test_other_text_than_all_linear_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"lora\.target_modules: 'all' is not known; use 'all-linear'"):
        LoraConfig(target_modules="all")


def test_model_without_such_layers_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"no linear layer q_proj, .* outside experts; name its layers"):
        adapter_targets({"transformer.h.0.attn.c_attn.weight": (8, 8)}, LoraConfig(rank=2))


def test_scaling_of_rslora_divides_by_the_root_of_the_rank() -> None:
    assert LoraConfig(rank=16, alpha=8).scaling == 0.5
    assert LoraConfig(rank=16, alpha=8, use_rslora=True).scaling == 2.0
    assert LoraConfig(rank=12, alpha=8, use_rslora=True).scaling == 8 / math.sqrt(12)
