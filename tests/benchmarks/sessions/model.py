"""Makes the model directory of the benchmark: a tokenizer with a chat template, and no weights."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.benchmarks.versions import ROOT
from tests.rollout.sessions.chats import TOOL_USE

WORDS = 4096
"""Tokens of the vocabulary."""
SPECIAL = ["<pad>", "<bos>", "<|im_start|>", "<|im_end|>"]

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2**20,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
"""A small model, for engines that need one; its weights are random."""


def write_model(directory: Path) -> None:
    """Write a tokenizer that was trained on the documents, with a chat template, and a config."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train([str(path) for path in sorted((ROOT / "docs").glob("*.md"))], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<bos>", pad_token="<pad>"
    )
    fast.chat_template = TOOL_USE
    fast.save_pretrained(directory)
    config = {**QWEN2, "vocab_size": tokenizer.get_vocab_size(), "eos_token_id": fast.eos_token_id}
    (directory / "config.json").write_text(json.dumps(config))
