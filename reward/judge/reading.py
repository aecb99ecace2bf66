"""Parses scores from a judge's answer."""

import json
import math
import re
from collections import deque
from collections.abc import Callable
from typing import Any

from protocol.user_code import import_attribute
from reward.judge.config import WHAT, Options

MAX_PARSED_CHARS = 100_000
"""Number of characters at the end of an answer that are searched for a score."""
_LISTS = re.compile(r"\[[-+0-9.eE,\s]*\]")


class Unreadable(Exception):
    """An answer without a score; the client retries."""


Reader = Callable[[str, int], list[float]]
"""(text, number of scores) -> scores. Raises Unreadable."""


def make_reader(options: Options, whole: bool) -> tuple[Reader, str]:
    """Return the function that parses an answer, and the user's file that defines it, or "".

    Args:
        options: options of the judge.
        whole: whether an answer contains the scores of a whole group.

    Raises:
        SettingsError: the user's function cannot be imported.
    """
    if options.parse:
        function, file = import_attribute(options.parse, f"{WHAT}: option parse")
        return lambda text, n: _by_function(options, function, text, n, whole), file
    if whole:
        return lambda text, n: _list(options, text, n), ""
    pattern = re.compile(options.pattern)
    return lambda text, n: [_last_match(options, pattern, text)], ""


def _by_function(
    options: Options, function: Callable[[str], Any], text: str, n: int, whole: bool
) -> list[float]:
    try:
        parsed = function(text)
    except ValueError as error:
        raise Unreadable(f"{options.parse}: {error}") from error
    values = parsed if whole else [parsed]
    if not isinstance(values, (list, tuple)) or len(values) != n:
        raise Unreadable(f"{options.parse} returned no list of {n} scores")
    for value in values:
        if not isinstance(value, (bool, int, float)) or not abs(value) <= 1e30:
            raise Unreadable(f"{options.parse} returned {str(value)[:60]!r}, which is not a finite number")
    return [float(value) for value in values]


def _last_match(options: Options, pattern: re.Pattern[str], text: str) -> float:
    matches = deque(pattern.finditer(text[-MAX_PARSED_CHARS:]), maxlen=1)
    if not matches:
        raise Unreadable(f"no match of {options.pattern!r} in the answer {_shown(text)}")
    last = matches[0]
    return _scaled(options, last.group(1) if pattern.groups else last.group(), text)


def _list(options: Options, text: str, n: int) -> list[float]:
    lists = _LISTS.findall(text[-MAX_PARSED_CHARS:])
    try:
        numbers = json.loads(lists[-1]) if lists else None
    except (ValueError, RecursionError):
        numbers = None
    if not isinstance(numbers, list) or len(numbers) != n:
        raise Unreadable(f"no list of {n} numbers at the end of the answer {_shown(text)}")
    return [_scaled(options, number, text) for number in numbers]


def _scaled(options: Options, value: Any, text: str) -> float:
    """Return the judge's number scaled to a score from 0 to 1."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not options.lowest <= number <= options.highest:
        raise Unreadable(
            f"{str(value)[:60]!r} is no number between {options.lowest:g} and {options.highest:g}, in the "
            f"answer {_shown(text)}"
        )
    return (number - options.lowest) / (options.highest - options.lowest)


def _shown(text: str) -> str:
    return repr(text if len(text) <= 120 else f"{text[:60]} ... {text[-60:]}")
