"""Scores 1 if the last whole number in the response is the answer, else 0."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.errors import RewardError
from reward.verifiers.registry import required_text

SEPARATOR = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)
"""Comma in 12,345."""
CURRENCY = re.compile(r"\\?[$\u20ac\u00a3\u00a5](?=-?\d)", re.ASCII)
"""Currency sign in $72 and -$5."""
MINUS = re.compile(r"\u2212|(?<!\d)\u2013(?=\d)", re.ASCII)
"""Unicode's minus, and an en dash used as minus. Between digits, a dash means a range."""
NUMBER = re.compile(r"(?:(?<!\d)-)?\d(?:[\d.,/]|\u2013(?=\d))*(?:[eE][-+]?\d+)?", re.ASCII)
"""Number with all attached characters, such as 3.5, 1/2, 1,5 or 1e6. 5-3 is two unsigned numbers."""
WHOLE = re.compile(r"(-?\d+)(?:\.0*)?(?:[eE]\+?(\d{1,3}))?[.,/]*", re.ASCII)
"""Whole number, also in the forms 72.00 and 1e6."""
MARK = "####"
"""Mark before the answer in GSM8K's solutions."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `last_integer`."""

    key: str = "answer"
    """Field of the metadata with the answer."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Return 1 if the numbers are equal, ignoring leading zeros, else 0.

    The answer may have the forms of GSM8K: 1,234, $72, 72.00, 72., or a solution that ends with #### 72.
    Numbers that are not whole (3.5, 1/2, 1,5, a range) are skipped and never parsed in part.

    Raises:
        RewardError: the answer is missing or not a whole number.
    """
    answer = required_text(metadata, options.key).rpartition(MARK)[2].strip().removesuffix(".")
    expected = WHOLE.fullmatch(_bare(answer))
    if not expected:
        raise RewardError(f"the answer {answer[:80]!r} is not a whole number")
    numbers = [whole for number in NUMBER.findall(_bare(response)) if (whole := WHOLE.fullmatch(number))]
    return float(bool(numbers) and _normal(numbers[-1]) == _normal(expected))


def _bare(text: str) -> str:
    """Return the text with plain minus signs, without thousands separators and currency signs."""
    return SEPARATOR.sub("", CURRENCY.sub("", MINUS.sub("-", text)))


def _normal(whole: re.Match[str]) -> str:
    """Return the digits as text, because `int` refuses thousands of digits."""
    digits = whole[1].lstrip("-").lstrip("0") + "0" * int(whole[2] or 0)
    return f"-{digits}" if whole[1].startswith("-") and digits.strip("0") else digits.lstrip("0") or "0"
