"""Creates a hybrid model with random weights and a character tokenizer.

    python deploy/examples/hybrid/make_model.py qwen3_next DIR
    python deploy/examples/hybrid/make_model.py qwen3_5_text DIR
    python deploy/examples/hybrid/make_model.py qwen3_5_text DIR --size 1.5b

In a tiny model the first layer is a gated delta net and the second one attention. In a large model every
fourth layer is attention. qwen3_next has experts in each layer.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.config import ScratchConfig
from trainer.random_model import EOS, PAD, write_tokenizer

VOCABULARY = "0123456789= "
SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY) + 2,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": EOS,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}
PRINTABLE = "".join(map(chr, range(ord(" "), ord("~") + 1)))
LARGE = SIZES | {
    "vocab_size": len(PRINTABLE) + 2,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "num_hidden_layers": 24,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,  # two for each key: vLLM's kernel wants no other layout of Qwen3-Next's
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 2048,
    "initializer_range": 0.01,
}
LARGE_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 832,
    "shared_expert_intermediate_size": 512,
}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {"qwen3_next": SIZES | EXPERTS, "qwen3_5_text": SIZES},
    "1.5b": {"qwen3_next": LARGE | LARGE_EXPERTS, "qwen3_5_text": LARGE},
}
"""Size -> model type -> fields of config.json."""


def make_model(model_type: str, directory: Path, size: str = "tiny") -> None:
    """Write a model of `MODELS`. A tiny model is float32 and reproducible byte for byte."""
    fields, is_tiny = MODELS[size][model_type], size == "tiny"
    config = type(AutoConfig.for_model(model_type))(**fields)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() and not is_tiny else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if is_tiny else torch.bfloat16)
    model.save_pretrained(directory)
    vocabulary, positions = VOCABULARY if is_tiny else PRINTABLE, fields["max_position_embeddings"]
    write_tokenizer(ScratchConfig(vocabulary=vocabulary, max_position_embeddings=positions), directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model_type", choices=sorted(MODELS["tiny"]))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=sorted(MODELS), default="tiny")
    arguments = parser.parse_args()
    make_model(arguments.model_type, arguments.directory, arguments.size)
