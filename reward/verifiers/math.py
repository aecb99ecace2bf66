"""Scores 1 if the response equals the answer mathematically (math-verify), else 0."""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from math_verify import parse, verify

from protocol.errors import RewardError
from reward.verifiers.math_limits import BOXED, final_answer, why_too_costly
from reward.verifiers.registry import required

for _module in ("parser", "grader"):  # they warn about every call without their own timeout
    logging.getLogger(f"math_verify.{_module}").setLevel(logging.ERROR)

FORMULA = re.compile(r"[\\^_{]|\d\s*[-+*/]\s*[a-zA-Z]|[a-zA-Z]\s*[-+*]|[-+*]\s*[a-zA-Z]", re.DOTALL)
"""Marks an answer that is a formula, rather than a number or words."""
DELIMITED = re.compile(r"\$|\\boxed|\\\(|\\\[")
"""Marks a formula in its signs of LaTeX."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `math`."""

    key: str = "answer"
    """Field of the metadata with the answer."""
    digits: int = 6
    """Decimal digits to which numbers are compared."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Return 1 if response and answer are equal, else 0.

    Of the response, the last boxed answer is read, or its last 1,000 characters if there is no box. An answer
    over the limits of `reward/verifiers/math_limits.py` scores 0 unread. The timeouts of math-verify are off,
    since they need signals; the pool limits the time.

    Raises:
        RewardError: the answer is missing, over the limits, or cannot be parsed.
    """
    answer = str(required(metadata, options.key))
    final = final_answer(response)
    if _unboxed(answer) and _unboxed(final) == _unboxed(answer):
        return 1.0
    if problem := why_too_costly(f"${answer}$"):
        raise RewardError(f"the answer {answer[:80]!r} is over the limits of math: it has {problem}")
    texts = [answer, f"${answer}$"]
    if FORMULA.search(answer) and not DELIMITED.search(answer):
        texts.reverse()  # math-verify would take a number in it for the answer
    gold = parse(texts[0], parsing_timeout=None) or parse(texts[1], parsing_timeout=None)
    if not gold:
        raise RewardError(f"the answer {answer[:80]!r} is not an expression that math-verify can parse")
    if why_too_costly(final):
        return 0.0
    found = parse(final, parsing_timeout=None)
    return float(bool(found) and verify(gold, found, float_rounding=options.digits, timeout_seconds=None))


def _unboxed(text: str) -> str:
    """Return an expression without box and signs of LaTeX around it, and with single spaces."""
    text = " ".join(text.split()).strip("$ ")
    return text[len(BOXED) : -1] if text.startswith(BOXED) and text.endswith("}") else text
