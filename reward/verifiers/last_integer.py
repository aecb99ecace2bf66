"""Scores 1 if the last whole number in the response is the answer, else 0."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.errors import RewardError
from reward.verifiers.registry import required

SEPARATOR = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
"""The comma in 12,345."""
DOLLAR = re.compile(r"\$(?=-?\d)", re.ASCII)
"""The sign in $72 and -$5."""
INTEGER = re.compile(r"(?<![\d.])(-?\d+)(?:\.0+)?(?!\d|\.\d)", re.ASCII)
"""A whole number, also written as 72.00: no part of 3.5, and without the minus of 5-3."""
MARK = "####"
"""What precedes the answer in GSM8K's solutions."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `last_integer`."""

    key: str = "answer"
    """Field of the metadata with the answer."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Return 1 if the numbers are equal, ignoring leading zeros, else 0.

    The answer may have the forms of GSM8K: 1,234, $72, 72.00, 72., or a solution that ends with #### 72.

    Raises:
        RewardError: the answer is missing or not a whole number.
    """
    answer = str(required(metadata, options.key)).rpartition(MARK)[2].strip().removesuffix(".")
    expected = INTEGER.fullmatch(_bare(answer))
    if not expected:
        raise RewardError(f"the answer {answer[:80]!r} is not a whole number")
    found = INTEGER.findall(_bare(response))
    return float(bool(found) and _normal(found[-1]) == _normal(expected[1]))


def _bare(text: str) -> str:
    """Return the text without separators of thousands and signs of dollars."""
    return SEPARATOR.sub("", DOLLAR.sub("", text))


def _normal(number: str) -> str:
    """Return the digits as text, since `int` refuses thousands of them."""
    digits = number.lstrip("-").lstrip("0") or "0"
    return f"-{digits}" if number.startswith("-") and digits != "0" else digits
