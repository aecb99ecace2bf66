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
HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
PADDING: dict[str, Any] = {"pad_token_id": 0}
OF_GEMMA4: dict[str, Any] = {
    "head_dim": 256,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
}
CHANGES: dict[str, dict[str, Any]] = {
    "camembert": PADDING,
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "cwm": {"bos_token_id": 2},
    "data2vec-text": PADDING,
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 96,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
    },
    "gemma4_text": OF_GEMMA4,
    "gemma4_unified_text": OF_GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "modernbert-decoder": PADDING,
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID,
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_embds_dim": [16, 48]},
    "roberta": PADDING,
    "roberta-prelayernorm": PADDING,
    "whisper": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "xlm-roberta": PADDING,
    "xlm-roberta-xl": PADDING,
    "xmod": {"default_language": "en_XX", **PADDING},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Fields that a type needs beside them."""
ABSENT: dict[str, tuple[str, ...]] = {
    "falcon": ("head_dim",),
    "prophetnet": ("num_hidden_layers",),
    "xlnet": ("max_position_embeddings",),
    "xlstm": ("v_head_dim",),
}
"""Fields of configurations that cannot be set."""


def save_tiny(model_type: str, directory: Path, **changes: Any) -> Path:
    """Write a float32 model with random weights, and fields of its configuration; returns its directory."""
    config = tiny_config(AutoConfig.for_model(model_type), **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    path = directory / model_type
    model.save_pretrained(path)
    return path


def tiny_config(default: Any, **changes: Any) -> Any:
    """Return a configuration with the sizes above, in those within it, too."""
    kind = default.model_type
    known = default.to_dict().keys() | default.attribute_map.keys()  # layers may differ in a field
    fields = {name: value for name, value in SIZES.items() if name in known - {*ABSENT.get(kind, ())}}
    if "kv_lora_rank" in fields:  # latent attention has as many heads for keys
        fields["num_key_value_heads"] = fields["num_attention_heads"]
        fields["head_dim"] = fields["qk_rope_head_dim"]
    within = {name: getattr(default, name, None) for name in default.sub_configs}
    fields |= {name: tiny_config(part) for name, part in within.items() if part is not None}
    return type(default)(**{**fields, **CHANGES.get(kind, {}), **changes})
