"""Makes the tokenizer and the messages of the benchmark: an agent with a tool, and a history that grows."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.benchmarks.versions import ROOT
from tests.rollout.sessions.chats import SPECIAL, TOOL_USE

WORDS = 4096
"""Tokens of the vocabulary."""
RESULT_CHARACTERS = 600
"""Of what a tool returns to the agent, and so of each message that a call adds."""
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Use {name} to work on the task; it returns text.",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}},
                "required": ["text"],
            },
        },
    }
    for name in ("search", "read", "write", "run")
]


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


def opening(number: int) -> list[dict[str, Any]]:
    """Return the first messages of a session."""
    text = (ROOT / "docs/glossary.md").read_text()[:RESULT_CHARACTERS]
    return [
        {"role": "system", "content": f"You are an agent with tools. {text}"},
        {"role": "user", "content": f"Task {number}: {text[::-1]}"},
    ]


def following(said: str, turn: int) -> list[dict[str, Any]]:
    """Return what the harness adds after an answer: the answer, and the result of a tool."""
    start = turn * RESULT_CHARACTERS
    text = (ROOT / "docs/engines.md").read_text()[start : start + RESULT_CHARACTERS]
    return [{"role": "assistant", "content": said}, {"role": "user", "content": f"Result {turn}: {text}"}]
