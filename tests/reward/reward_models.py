"""Writes tiny random reward models of transformers, and computes with them as it does."""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from trainer.config import ScratchConfig
from trainer.random_model import write_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
LETTERS = "0123456789 abcdefghijklmnopqrstuvwxyz:?\n"


def write_reward_model(
    directory: Path,
    *,
    labels: int = 1,
    template: bool = False,
    pad: int | None = None,
    hidden: int = 32,
    kind: str = "qwen2",
) -> Path:
    """One layer, weights that make scores of both signs; `pad` is the padding that its config names.

    vLLM on a CPU needs heads of 32 numbers: `hidden` 128.
    """
    directory.mkdir(parents=True)
    config = AutoConfig.for_model(
        kind,
        vocab_size=2 + len(LETTERS),
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,
        num_labels=labels,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    write_tokenizer(ScratchConfig(vocabulary=LETTERS), directory)
    if template:
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return directory


def logits_of_transformers(
    path: Path, texts: list[str], *, special: bool = True, limit: int = 256
) -> list[float]:
    """The logit of each text alone."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    found = []
    for text in texts:
        tokens = tokenizer.encode(text, add_special_tokens=special)[:limit]
        with torch.no_grad():
            found.append(float(model(input_ids=torch.tensor([tokens])).logits[0, 0]))
    return found
