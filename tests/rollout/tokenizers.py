"""Real tokenizers and model directories for tests, written into a temporary directory."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789= abcdefghijklmnopqrstuvwxyz?.+-"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(
    directory: Path, *, template: str | None = None, eos: str | None = "<eos>", more: str = ""
) -> Path:
    """A tokenizer of single characters: `CHARACTERS` and `more`."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS, "\n", *more])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=SPECIAL[3:],
    )
    fast.chat_template = template
    directory.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": len(vocabulary)}))
    return directory
