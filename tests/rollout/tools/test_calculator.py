"""The calculator: what it computes, and what it refuses before it takes time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.tools.calculator import MAX_CHARACTERS, calculate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("48/2", "24"),
        ("2 + 3 * 4", "14"),
        ("-(1 - 2) ** 3", "1"),
        ("7 // 2\n\n7 % 2", "3\n1"),
        ("1/3", "0.333333333333"),
        ("$1,234 + 1 =", "1235"),
        ("6 × 7 ÷ 2", "21"),
        ("2 ** 0.5", "1.41421356237"),
    ],
)
def test_lines_of_arithmetic_have_their_values(text: str, value: str) -> None:
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "1/0",
        "x + 1",
        "(1",
        "'a' * 9",
        "True",
        "2 ** 10**9",
        "9 ** 9 ** 9",
        "(-8) ** 0.5",
        "1e308 * 10 ** 300",
        "__import__('os')",
        "1 if 1 else 2",
        "",
        "0" * (MAX_CHARACTERS + 1),
        "(" * 500 + "1" + ")" * 499,
    ],
)
def test_anything_else_is_an_error_in_words(text: str) -> None:
    answer = calculate(text)
    assert answer.startswith("error: ") or answer == "inf"


@given(st.text(alphabet="0123456789+-*/%(). \n", max_size=60))
def test_no_expression_raises_or_is_long(text: str) -> None:
    assert len(calculate(text)) < 400 * (1 + text.count("\n"))
