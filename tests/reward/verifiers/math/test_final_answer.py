"""Tests which part of a response `math` takes for the final answer."""

import pytest

from reward.verifiers.math.final_answer import LONGEST, final_answer, unboxed


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("first \\boxed{1}, then \\boxed{2}.", "\\boxed{2}"),
        ("\\boxed{\\frac{1}{2}} etc", "\\boxed{\\frac{1}{2}}"),
        ("$\\boxed{1}$ and $\\boxed{2}$", "$\\boxed{1}$ and $\\boxed{2}$"),
        ("so $\\boxed{50}\\%$", "$\\boxed{50}\\%"),
        ("\\boxed{1} but the final answer is 2", "2"),
        ("cut \\boxed{\\frac{1}{2}", "\\boxed{\\frac{1}{2}"),
        ("x" * 5000 + "7", "x" * (LONGEST - 1) + "7"),
        ("", ""),
    ],
)
def test_the_last_box_or_the_end_is_read(response: str, expected: str) -> None:
    assert final_answer(response) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{1}", "1"),
        ("$\\boxed{1}$ and $\\boxed{\\frac{1}{2}}$", "$1$ and $\\frac{1}{2}$"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("\\boxed{42", "42"),
        ("\\boxed{\\frac{1}{2}", "\\frac{1}{2}"),
        ("\\boxed{}", ""),
    ],
)
def test_a_box_is_replaced_by_its_content(text: str, expected: str) -> None:
    assert unboxed(text) == expected
