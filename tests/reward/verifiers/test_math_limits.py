"""Tests what `math` reads of a response, and which expressions it refuses to read."""

import pytest

from reward.verifiers.math_limits import DEPTH, LONGEST, final_answer, why_too_costly


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("first \\boxed{1}, then \\boxed{2}.", "\\boxed{2}"),
        ("\\boxed{\\frac{1}{2}} etc", "\\boxed{\\frac{1}{2}}"),
        ("$\\boxed{1}$ and $\\boxed{2}$", "$\\boxed{1}$ and $\\boxed{2}$"),
        ("so $\\boxed{50}\\%$", "$\\boxed{50}\\%"),
        ("\\boxed{1} but the final answer is 2", "\\boxed{1} but the final answer is 2"),
        ("cut \\boxed{\\frac{1}{2}", "\\boxed{\\frac{1}{2}"),
        ("x" * 5000 + "7", "x" * (LONGEST - 1) + "7"),
        ("", ""),
    ],
)
def test_the_last_box_or_the_end_is_read(response: str, expected: str) -> None:
    assert final_answer(response) == expected


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
def test_what_would_take_too_long_is_not_read(text: str, why: str) -> None:
    assert why in why_too_costly(text)
