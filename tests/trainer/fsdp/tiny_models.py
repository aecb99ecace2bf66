"""Makes a tiny random model of any type that transformers has."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
"""Fields of configurations; a type has some of them."""
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
}
"""Fields that a type needs beside them."""


def save_tiny(model_type: str, directory: Path, **changes: Any) -> Path:
    """Write a float32 model with random weights, and fields of its configuration; returns its directory."""
    default = AutoConfig.for_model(model_type)
    known = default.to_dict().keys() | default.attribute_map.keys()  # layers may differ in a field
    fields = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in fields:  # latent attention has as many heads for keys
        fields["num_key_value_heads"] = fields["num_attention_heads"]
        fields["head_dim"] = fields["qk_rope_head_dim"]
    config = type(default)(**{**fields, **CHANGES.get(model_type, {}), **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    path = directory / model_type
    model.save_pretrained(path)
    return path
