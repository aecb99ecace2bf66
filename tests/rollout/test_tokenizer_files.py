"""A tokenizer that is read without transformers does what transformers does with the same directory."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rollout.tokenizer_files import PlainTokenizer, load_plain
from trainer.config import ScratchConfig
from trainer.random_model import write_tokenizer

VOCABULARY = "0123456789=+- ab\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(ScratchConfig(vocabulary=VOCABULARY), made)
    return made


@pytest.fixture(scope="module")
def both(directory: Path) -> tuple[PlainTokenizer, PreTrainedTokenizerFast]:
    plain = read(directory)
    assert plain is not None
    return plain, PreTrainedTokenizerFast.from_pretrained(directory)


def read(directory: Path) -> PlainTokenizer | None:
    return load_plain(directory, json.loads((directory / "tokenizer_config.json").read_text()))


PIECES = st.lists(st.sampled_from([*VOCABULARY, "<eos>", "<pad>", "x", "\u00e9"]), max_size=30)


@given(text=PIECES.map("".join), special=st.booleans())
def test_tokens_and_text_are_those_of_transformers(
    both: tuple[PlainTokenizer, PreTrainedTokenizerFast], text: str, special: bool
) -> None:
    plain, theirs = both
    ids = plain.encode(text, add_special_tokens=special)
    assert ids == theirs.encode(text, add_special_tokens=special)
    for skip in (False, True):
        assert plain.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
    assert (plain.eos_token_id, plain.chat_template) == (theirs.eos_token_id, theirs.chat_template)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}),
        ("tokenizer_config.json", {"add_bos_token": True}),
        ("tokenizer_config.json", {"eos_token": "<end>"}),
        ("chat_template.jinja", None),
        ("special_tokens_map.json", None),
    ],
)
def test_tokenizer_that_transformers_extends_is_left_to_it(
    directory: Path, tmp_path: Path, file: str, changes: dict[str, object] | None
) -> None:
    other = shutil.copytree(directory, tmp_path / "other")
    path = other / file
    path.write_text("{}" if changes is None else json.dumps(json.loads(path.read_text()) | changes))
    assert read(other) is None
