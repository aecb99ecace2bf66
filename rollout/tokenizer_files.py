"""Loads the tokenizer of a model directory."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from protocol.device.hf_models import code_trust
from protocol.errors import SettingsError

SPECIALS = ("bos_token", "eos_token", "pad_token", "unk_token")
WITHOUT_EFFECT = ("backend", "clean_up_tokenization_spaces", "model_max_length", "tokenizer_class")
"""Settings of tokenizer_config.json that do not affect tokens or text in `Renderer`."""
ALONE = {"tokenizer.json", "tokenizer_config.json"}


class PlainTokenizer:
    """Tokenizer equivalent to `transformers.PreTrainedTokenizerFast`, without importing transformers."""

    chat_template = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int | None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        # the batch method releases the GIL
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def get_vocab(self) -> dict[str, int]:
        """Return the vocabulary: token -> id."""
        found: dict[str, int] = self._tokenizer.get_vocab()
        return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False, **unused: bool) -> str:
        """Return the text of token ids; `clean_up_tokenization_spaces` is ignored, and False in all calls."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def load_plain(model_dir: Path, config: Mapping[str, Any]) -> PlainTokenizer | None:
    """Return the tokenizer of a directory; None if transformers would read more than tokenizer.json.

    Args:
        model_dir: directory whose tokenizer class only wraps tokenizer.json.
        config: parsed tokenizer_config.json.

    Raises:
        Exception: tokenizer.json is invalid.
    """
    found = {path.name for path in model_dir.iterdir() if "token" in path.name or "template" in path.name}
    specials = {name: config.get(name) for name in SPECIALS}
    if found != ALONE or config.keys() - {*SPECIALS, *WITHOUT_EFFECT}:
        return None
    known = json.loads((model_dir / "tokenizer.json").read_bytes()).get("added_tokens", [])
    ids = {token["content"]: int(token["id"]) for token in known if token["special"]}
    if not all(token is None or token in ids for token in specials.values()):
        return None
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    eos = specials["eos_token"]
    return PlainTokenizer(tokenizer, None if eos is None else ids[eos])


GENERIC = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Values of `tokenizer_class` that only wrap tokenizer.json."""


def vocabulary_of(model_dir: Path) -> Mapping[str, int]:
    """Return the vocabulary of a model's tokenizer: token -> id.

    Raises:
        SettingsError: the directory has no tokenizer, or the tokenizer cannot be loaded.
    """
    path = model_dir / "tokenizer.json"
    try:
        vocabulary: Mapping[str, int] = (
            Tokenizer.from_file(str(path)) if path.is_file() else load_tokenizer(model_dir)
        ).get_vocab()
    except SettingsError:
        raise
    except Exception as error:  # the tokenizers library raises its own exception types
        raise SettingsError(f"the tokenizer in {model_dir} cannot be loaded: {str(error)[:300]}") from error
    return vocabulary


def load_tokenizer(model_dir: Path, *, plain_suffices: bool = True) -> Any:
    """Load the tokenizer of a directory.

    Args:
        model_dir: directory with the tokenizer files.
        plain_suffices: whether `PlainTokenizer` suffices. False if the caller sets a chat template, which
            only transformers can apply.

    Raises:
        SettingsError: the directory has no tokenizer, or the tokenizer cannot be loaded.
    """
    if not any(
        (model_dir / name).is_file()
        for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    ):
        raise SettingsError(
            f"no tokenizer in {model_dir}: it needs tokenizer.json beside the model "
            "(save_pretrained writes it)"
        )
    # parallel encoding pays for many texts at once; each call here encodes a single text
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        path = model_dir / "tokenizer_config.json"
        config = json.loads(path.read_bytes()) if path.is_file() else {}
        # For these classes, AutoTokenizer would load the tokenizer class of the model family, with other
        # tokens.
        if config.get("tokenizer_class") in GENERIC:
            plain = load_plain(model_dir, config) if plain_suffices else None
            if plain is not None:
                return plain
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader  # imports torch and every model class
        return Loader.from_pretrained(str(model_dir), local_files_only=True, **code_trust())
    except Exception as error:  # OSError, ValueError, or exceptions of the tokenizers library
        raise SettingsError(
            f"the tokenizer in {model_dir} cannot be loaded: {type(error).__name__}: {str(error)[:300]}"
        ) from error


def end_ids(model_dir: Path, tokenizer: Any) -> list[int]:
    """Return the end-of-sequence ids of the tokenizer and of generation_config.json."""
    path = model_dir / "generation_config.json"
    try:
        found = json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise SettingsError(f"{path}: {error}") from None
    listed = found if isinstance(found, list) else [found]
    return [int(i) for i in (*listed, tokenizer.eos_token_id) if i is not None]
