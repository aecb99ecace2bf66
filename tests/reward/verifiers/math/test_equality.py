"""Answers in the forms of MATH and GSM8K: what equals them, and near misses that do not."""

from pathlib import Path

import pytest

from reward.verifiers.math import Options, score

FORMS = Path(__file__).with_name("forms.txt").read_text(encoding="utf-8")


def pairs(sign: str) -> list[tuple[str, str]]:
    """Return (answer, content of a box) of the lines that begin with a sign."""
    found, answer = [], ""
    for line in FORMS.splitlines():
        if line[:1] not in ("", " ", "#"):
            answer = line
        elif line.startswith(f"  {sign} "):
            found.append((answer, line[4:]))
    return found


EQUAL, DIFFERENT = pairs("="), pairs("!")


def grade(response: str, answer: str) -> float:
    return score("", response, {"answer": answer}, Options())


@pytest.mark.parametrize(("answer", "said"), EQUAL)
def test_a_box_that_says_the_same_is_right(answer: str, said: str) -> None:
    assert grade(f"Thus we get $\\boxed{{{said}}}$.", answer) == 1.0


@pytest.mark.parametrize(("answer", "said"), DIFFERENT)
def test_a_part_of_an_answer_or_a_near_miss_is_wrong(answer: str, said: str) -> None:
    assert grade(f"Thus we get $\\boxed{{{said}}}$.", answer) == 0.0


@pytest.mark.parametrize(
    ("answer", "said"), [pair for pair in DIFFERENT if pair != ("2x+y=3", "3")]
)  # a box may state the equation that ends in the answer
def test_an_answer_is_no_part_of_a_longer_response(answer: str, said: str) -> None:
    assert grade(f"\\boxed{{{answer}}}", said) == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("The answer is 3, 5, 7.", "3, 5, 7", 1.0),
        ("The answer is 3, 5, 7.", "7", 0.0),
        ("The answer is $6-5i$.", "6 - 5i", 1.0),
        ("so it is 6 - 5i", "5", 0.0),
        ("The answer is C", "C", 1.0),
        ("The answer is (C).", "\\text{(C)}", 1.0),
        ("The answer is: C. A is wrong", "C", 1.0),
        ("The answer is B", "C", 0.0),
        ("<think>maybe \\boxed{3}</think> The answer is 4.", "4", 1.0),
        ("<think>maybe \\boxed{3}</think> The answer is 4.", "3", 0.0),
        ("<think>maybe \\boxed{3}</think>", "3", 1.0),
        ("\\boxed{42", "42", 1.0),
        ("\\boxed{42", "4", 0.0),
        ("Answer: 12 because 3 * 4 = 12", "12", 1.0),
        ("2 + 3 = 5", "5", 1.0),
        ("2 + 3 = 5", "3", 0.0),
        ("we get 5.", "5", 1.0),
        ("between 3\u20135", "3", 0.0),
        ("between 3\u20135", "5", 0.0),
        ("#### 72", "72", 1.0),
        ("**Answer:** 72", "72", 1.0),
        ("I think that is all", "3", 0.0),
        ("", "3", 0.0),
        ("\\boxed{}", "3", 0.0),
        ("The final answer is $x=3$ or $x=4$. I hope it is correct.", "3, 4", 1.0),
        ("The final answer is $x=3$ or $x=4$.", "4", 0.0),
    ],
)
def test_the_final_answer_without_a_box_is_read_as_a_whole(
    response: str, answer: str, expected: float
) -> None:
    assert grade(response, answer) == expected
