"""Scores 1 if the response equals the answer mathematically (math-verify), else 0."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from math_verify import parse, verify

from protocol.errors import RewardError
from reward.verifiers.registry import required

for _module in ("parser", "grader"):  # they warn about every call without their own timeout
    logging.getLogger(f"math_verify.{_module}").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `math`."""

    key: str = "answer"
    """Field of the metadata with the answer."""
    digits: int = 6
    """Decimal digits to which numbers are compared."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Return 1 if response and answer are equal, else 0.

    The timeouts of math-verify are off, since they need signals; the pool limits the time.

    Raises:
        RewardError: the answer is missing or cannot be parsed.
    """
    answer = str(required(metadata, options.key))
    gold = parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
    if not gold:
        raise RewardError(f"the answer {answer[:80]!r} is not an expression that math-verify can parse")
    found = parse(response, parsing_timeout=None)
    return float(bool(found) and verify(gold, found, float_rounding=options.digits, timeout_seconds=None))
