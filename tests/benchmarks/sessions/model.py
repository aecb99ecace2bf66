"""Makes the model directory of the benchmark: a tokenizer with a chat template, and no weights."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.benchmarks.versions import ROOT
from tests.rollout.sessions.chats import SPECIAL, TOOL_USE

WORDS = 4096
"""Tokens of the vocabulary."""


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
    (directory / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size()}))
