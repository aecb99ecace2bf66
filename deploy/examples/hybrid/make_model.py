"""Makes a tiny hybrid model with random weights and a tokenizer of characters.

    python deploy/examples/hybrid/make_model.py qwen3_next DIR
    python deploy/examples/hybrid/make_model.py qwen3_5_text DIR

Its first layer is a gated delta net, its second one attention; qwen3_next has experts in both.
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
TYPES: dict[str, dict[str, Any]] = {"qwen3_next": SIZES | EXPERTS, "qwen3_5_text": SIZES}


def make_model(model_type: str, directory: Path) -> None:
    """Write a model of a type of `TYPES`, the same bytes each time."""
    config = type(AutoConfig.for_model(model_type))(**TYPES[model_type])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    write_tokenizer(ScratchConfig(vocabulary=VOCABULARY, max_position_embeddings=64), directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_type", choices=sorted(TYPES))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    make_model(arguments.model_type, arguments.directory)
