"""Makes a tiny random model of any type that transformers has."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

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
    "hidden_size_global": 128,
}
"""Fields of configurations; a type has some of them."""
HYBRID: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"]}
NO_LAYER_INPUT = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
PADDING: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 2, "max_position_embeddings": 132}
OF_GEMMA4: dict[str, Any] = {
    "pad_token_id": 0,
    "head_dim": 256,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
}
CHANGES: dict[str, dict[str, Any]] = {
    "camembert": PADDING,
    "codegen": {"rotary_dim": 8},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "blt_global_transformer": {"hidden_size": 128, "head_dim": 32},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "cwm": {"bos_token_id": 2},
    "data2vec-text": PADDING,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "emu3_text_model": PADDING,
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
    "mllama_text_model": PADDING,
    "modernbert-decoder": PADDING,
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID,
    "prophetnet": PADDING,
    "reformer": {
        "is_decoder": True,
        "pad_token_id": 0,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds_dim": [16, 48],
    },
    "roberta": PADDING,
    "roberta-prelayernorm": PADDING,
    "whisper": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "xlm-roberta": PADDING,
    "xlm-roberta-xl": PADDING,
    "xmod": {"default_language": "en_XX", **PADDING},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1]},
    "xlnet": {"d_head": 16},
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
    config = tiny_config(_default(model_type), **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    path = directory / model_type
    model.save_pretrained(path)
    return path


def _default(model_type: str) -> Any:
    """Return the default configuration of a type, with the configurations within it that it does not make."""
    within: dict[str, Any] = {}
    if model_type in ("musicgen", "musicgen_melody"):
        parts = {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": f"{model_type}_decoder"}
        kinds = {name: CONFIG_MAPPING[kind] for name, kind in parts.items() if kind in CONFIG_MAPPING}
        within = {name: kind().to_dict() for name, kind in kinds.items()}
    elif model_type.endswith("_assistant"):
        text = AutoConfig.for_model(model_type.replace("_assistant", "_text"))
        within = {"text_config": tiny_config(text, **dict.fromkeys(NO_LAYER_INPUT, 0)).to_dict()}
    return AutoConfig.for_model(model_type, **within)


def tiny_config(default: Any, **changes: Any) -> Any:
    """Return a configuration with the sizes above, in those within it, too."""
    kind = default.model_type
    known = default.to_dict().keys() | default.attribute_map.keys()  # layers may differ in a field
    fields = {name: value for name, value in SIZES.items() if name in known - {*ABSENT.get(kind, ())}}
    if "kv_lora_rank" in fields:  # latent attention has as many heads for keys
        fields["num_key_value_heads"] = fields["num_attention_heads"]
        fields["head_dim"] = fields["qk_rope_head_dim"]
    within = {name: getattr(default, name, None) for name in default.sub_configs}
    less = dict.fromkeys(NO_LAYER_INPUT if kind.endswith("_assistant") else (), 0)
    fields |= {name: tiny_config(part, **less) for name, part in within.items() if part is not None}
    return type(default)(**{**fields, **CHANGES.get(kind, {}), **changes})
