"""Tests which expressions `math` refuses to read."""

import pytest

from reward.verifiers.math.final_answer import LONGEST
from reward.verifiers.math.limits import DEPTH, why_too_costly


@pytest.mark.parametrize(
    "text",
    [
        "\\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a}", "2^{2023}", "2^{2^{3}}", "x^{2024} + (x+1)^{10}", "2023!",
        "(2n-1)!", "\\binom{2023}{2}", "\\sum_{k=1}^{100} k^2", "e^{-\\frac{(x-1)^2}{2 \\cdot 3^2}}", "(1, "
            "2] \\cup [3, \\infty)",
        "90^\\circ", "10^{-9}", "it is 123456789!", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
    ],
)  # fmt: skip
def test_answers_of_people_are_read(text: str) -> None:
    assert why_too_costly(text) == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("9^{9^{9^9}}", "an exponent"),
        ("9^9^9^9", "an exponent"),
        ("9**9**9**9", "an exponent"),
        ("2^{2^{2^{2^{2^{2}}}}}", "an exponent"),
        ("x^{9^{9^9}}", "an exponent"),
        ("9^ {999999999}", "an exponent"),
        ("9^{99 \\cdot 99 \\cdot 99}", "an exponent"),
        ("9^{9!}", "an exponent"),
        ("((9^{99})^{99})^{99}", "powers of powers"),
        ("(x+1)^{500}", "a polynomial"),
        ("$(9!)!$", "the factorial"),
        ("$9 ! !$", "a factorial of a factorial"),
        ("\\boxed{999999999!}", "the factorial"),
        ("$9^9!$", "a factorial of a factorial or power"),
        ("$9^{9}!$", "a factorial of a factorial or power"),
        ("(9999!)^{30}", "a power of a factorial"),
        ("\\binom{9999999999}{5000000000}", "a sum, product or binomial"),
        ("\\prod_{k=1}^{999999999} k", "a sum, product or binomial"),
        ("\\int" * 3, "more than 2 sums"),
        ("(" * (DEPTH + 1), "brackets"),
        ("\\frac{1}{" * 30, "brackets"),
        ("9" * 600, "a number of over"),
        ("1+" * LONGEST, "characters"),
    ],
)
def test_expression_that_would_take_too_long_is_not_read(text: str, why: str) -> None:
    assert why in why_too_costly(text)
