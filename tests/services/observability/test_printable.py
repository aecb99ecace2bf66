"""Tests that no text can drive a terminal once it is made printable."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.observability.printable import ALLOWED, ESCAPED, one_line, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, 12 + 3 = 15", "plain text, 12 + 3 = 15"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("over\rwritten\x08\x7f", "over\\x0dwritten\\x08\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("abc\u202edef\u2028", "abc\\u202edef\\u2028"),
        ("日本語 é 👩\u200d🚀 \u00a0", "日本語 é 👩\u200d🚀 \u00a0"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_text_keeps_what_is_harmless(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(alphabet=st.characters()))
def test_text_has_no_control_character_left(text: str) -> None:
    shown = printable(text)
    assert not [char for char in shown if unicodedata.category(char) in ESCAPED and char not in ALLOWED]
    assert printable(shown) == shown


@given(st.text(alphabet=st.characters()))
def test_a_line_has_no_line_end(text: str) -> None:
    assert len(one_line(f"a{text}b").splitlines()) == 1
    assert one_line("a\tb\nc") == "a\\x09b\\x0ac"
