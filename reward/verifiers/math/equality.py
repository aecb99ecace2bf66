"""Scores 1 if the response's final answer equals the prompt's answer mathematically, else 0.

Both answers are parsed completely: lists item by item, numbers exactly, words and units as text. math-verify
compares all other expressions.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from protocol.errors import RewardError
from reward.verifiers.math.final_answer import final_answer
from reward.verifiers.math.limits import why_too_costly
from reward.verifiers.math.reading import Item, bracketed, item, items, normalized
from reward.verifiers.registry import required_text

for _module in ("parser", "grader"):  # both warn about every call without their own timeout
    logging.getLogger(f"math_verify.{_module}").setLevel(logging.ERROR)

FORMULA = [LatexExtractionConfig()]
RATIO = re.compile(r"\s*:\s*")
COMMAND = re.compile(r"\\[a-zA-Z]+")
WORD = re.compile(r"\\word\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `math`."""

    key: str = "answer"
    """Field of the metadata with the answer."""
    digits: int = 6
    """Decimal places to which numbers are compared if one of them was written as a decimal."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Return 1 if response and answer are equal, else 0.

    A response's answer over the limits of `limits.py` scores 0 unparsed, unless the texts are equal. The
    timeouts of math-verify are off, because they need signals; the pool limits the time.

    Raises:
        RewardError: the answer is missing, empty, or over the limits.
    """
    answer = required_text(metadata, options.key)
    gold, prediction = normalized(answer), final_answer(response)
    if not any(character.isalnum() for character in gold):
        raise RewardError(f"the answer {answer[:80]!r} has neither a number nor a letter")
    if _same_text(gold, normalized(prediction)):
        return 1.0
    if problem := why_too_costly(f"${answer}$"):
        raise RewardError(f"the answer {answer[:80]!r} is over the limits of math: it has {problem}")
    if why_too_costly(f"${prediction}$"):
        return 0.0
    return float(_equal(gold, normalized(prediction), options.digits))


def _same_text(left: str, right: str) -> bool:
    """Return whether two normalized texts are equal up to spaces around commas and the ends of \\text."""
    first, second = (
        re.sub(r"\s*([,;])\s*", r"\1", " ".join(WORD.sub(r" \1 ", text).split())) for text in (left, right)
    )
    return first == second


def _equal(gold: str, prediction: str, digits: int) -> bool:
    """Return whether two normalized answers are equal: as lists, as tuples, or as single items."""
    golds, founds = items(gold), items(prediction)
    if len(golds) != len(founds):
        return len(golds) == 1 and len(founds) == 1
    if len(golds) > 1:
        return _match_in_any_order(golds, founds, digits)
    left, right = bracketed(golds[0]), bracketed(founds[0])
    if left and right:
        return (left[0], left[2]) == (right[0], right[2]) and _match_in_order(left[1], right[1], digits)
    ratios = RATIO.split(golds[0]), RATIO.split(founds[0])
    if max(map(len, ratios)) > 1:
        return _match_in_order(*ratios, digits)
    return _items_equal(golds[0], founds[0], digits)


def _match_in_order(golds: Sequence[str], founds: Sequence[str], digits: int) -> bool:
    return len(golds) == len(founds) and all(
        _equal(gold, prediction, digits) for gold, prediction in zip(golds, founds, strict=True)
    )


def _match_in_any_order(golds: Sequence[str], founds: Sequence[str], digits: int) -> bool:
    """Return whether the items of two lists match one to one."""
    rest = list(founds)
    for gold in golds:
        match = next((prediction for prediction in rest if _equal(gold, prediction, digits)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _items_equal(gold_text: str, found_text: str, digits: int) -> bool:
    if _same_text(gold_text, found_text):
        return True
    gold, prediction = item(gold_text), item(found_text)
    if gold.words or prediction.words:
        return _words_equal(gold, prediction)
    if gold.unit and prediction.unit and gold.unit != prediction.unit:
        return False  # a unit missing on one side is ignored
    if gold.number is not None and prediction.number is not None:
        scales = {Fraction(1)}
        if (gold.unit == "%") != (prediction.unit == "%"):
            scales.add(Fraction(1, 100) if prediction.unit == "%" else Fraction(100))
        decimal = gold.decimal or prediction.decimal
        return any(_close(gold.number, prediction.number * scale, digits, decimal) for scale in scales)
    return _expressions_equal(_latex(gold), _latex(prediction), digits)


def _words_equal(gold: Item, prediction: Item) -> bool:
    """Return whether letters, words or based numbers are the same text.

    All-capital words are case-sensitive.
    """
    left, right = (reading.words or normalized(reading.text) for reading in (gold, prediction))
    if left.isupper() and len(left) > 1:
        return left == right
    return left.lower() == right.lower()


def _close(gold: Fraction, prediction: Fraction, digits: int, decimal: bool) -> bool:
    """Return whether two numbers are equal: exactly or, as decimals, to `digits` places and relatively."""
    difference = abs(gold - prediction)
    if not difference or not decimal:
        return not difference
    size = max(abs(gold), abs(prediction))
    return difference <= Fraction(1, 2) / 10**digits and difference <= size / 10 ** max(0, digits - 1)


def _latex(reading: Item) -> str:
    """Return an item's text for math-verify, which would parse 1e6 as a product with Euler's number."""
    if reading.number is None or "e" not in reading.text.lower():
        return reading.text
    return f"\\frac{{{reading.number.numerator}}}{{{reading.number.denominator}}}"


def _expressions_equal(gold: str, prediction: str, digits: int) -> bool:
    """Return whether math-verify considers two expressions equal.

    math-verify rounds to `digits` places, so constants below 1 are also compared relative to their size.
    """
    left, right = _parsed(gold), _parsed(prediction)
    if left is None or right is None:
        return False
    if not verify(left, right, float_rounding=digits, allow_set_relation_comp=True, timeout_seconds=None):
        return False
    if not (getattr(left, "is_number", False) and getattr(right, "is_number", False)):
        return True
    size = max(abs(left.evalf(20)), abs(right.evalf(20)))
    return bool(size >= 1 or abs((left - right).evalf(20)) <= size / 10 ** max(0, digits - 1))


def _parsed(text: str) -> Any:
    """Return math-verify's expression for a text; None if math-verify cannot parse the whole text."""
    if any(character.isdigit() and not character.isascii() for character in text):
        return None
    text = text.replace("\\degree", "^\\circ").replace("\\word", "\\text")
    prediction = parse(f"${text}$", FORMULA, fallback_mode="no_fallback", parsing_timeout=None)
    if not prediction:
        return None
    letters = re.search(r"[a-zA-Z_]", COMMAND.sub("", text))
    return None if letters and getattr(prediction[0], "is_Rational", False) else prediction[0]
