"""Reads a tokenizer that consists of tokenizer.json alone, without importing transformers.

That import takes seconds, which every process would wait for that renders a prompt: the check before a start,
each rollout worker, the evaluation.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")
WITHOUT_EFFECT = ("backend", "clean_up_tokenization_spaces", "model_max_length", "tokenizer_class")
"""Settings of tokenizer_config.json that change neither tokens nor text as `Renderer` uses them."""
ALONE = {"tokenizer.json", "tokenizer_config.json"}


class PlainTokenizer:
    """Converts text as `transformers.PreTrainedTokenizerFast` does for the same directory."""

    chat_template = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int | None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of the tokens of a text."""
        # one text as a batch: other threads run meanwhile
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id."""
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **unused: bool) -> str:
        """Return the text of tokens. `clean_up_tokenization_spaces` is not supported, and never true here."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def load_plain(model_dir: Path, config: Mapping[str, Any]) -> PlainTokenizer | None:
    """Return the tokenizer of a directory, or None where transformers would do more than read tokenizer.json.

    Args:
        model_dir: has a tokenizer of a class that merely refers to tokenizer.json.
        config: its tokenizer_config.json.

    Raises:
        Exception: tokenizer.json is none.
    """
    found = {path.name for path in model_dir.iterdir() if "token" in path.name or "template" in path.name}
    specials = {name: config.get(name) for name in SPECIALS}
    if found != ALONE or config.keys() - {*SPECIALS, *WITHOUT_EFFECT}:
        return None
    known = json.loads((model_dir / "tokenizer.json").read_text()).get("added_tokens", [])
    ids = {token["content"]: int(token["id"]) for token in known if token["special"]}
    if not all(token is None or token in ids for token in specials.values()):
        return None
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    eos = specials["eos_token"]
    return PlainTokenizer(tokenizer, None if eos is None else ids[eos])
