"""Parses JSON of strangers: it can be written again, and is no more work than its reader allows.

The standard library's parser lets no other thread run until it has read all. So the Python half of it reads a
large document, value by value, up to the last value that is allowed.
"""

import json
import json.decoder
import json.scanner
import math
import re
from collections.abc import Callable
from typing import Any

WHOLE = 1 << 16
"""Characters of a document that is parsed in one piece."""
MOST_VALUES = 100_000
"""Values of a larger document, besides as many as its reader expects."""
_NUMBERS = re.compile(r"[0-9,\s]*\]")

Scan = Callable[[str, int], tuple[Any, int]]


class TooManyValues(ValueError):
    """JSON with more values than are read."""


def parsed_json(text: str, more: int = 0) -> Any:
    """Parse JSON that can be written again.

    Args:
        text: the document.
        more: values that a document may have besides `MOST_VALUES`, such as the tokens of a context.

    Raises:
        TooManyValues: there are more.
        ValueError: it is no JSON, a number in it is not finite, or a string has half of a surrogate pair,
            which is no text.
        RecursionError: it is nested too deeply.
    """
    if len(text) <= WHOLE:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    else:
        value = _BoundedDecoder(MOST_VALUES + more).decode(text)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


class _BoundedDecoder(json.JSONDecoder):
    """Decoder of one document, which counts the values in its arrays and objects."""

    def __init__(self, most: int) -> None:
        super().__init__(parse_float=_finite, parse_constant=_finite)
        self._most = self._left = most
        self._scan_numbers: Scan = self.scan_once
        self.parse_array: Any = self._array
        self.parse_object: Any = self._object
        self.scan_once: Scan = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _count(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise TooManyValues(f"over {self._most} values")

    def _counted(self, scan: Scan) -> Scan:
        def scan_next(text: str, at: int) -> tuple[Any, int]:
            self._count(1)
            return scan(text, at)

        return scan_next

    def _array(self, place: tuple[str, int], scan: Scan) -> tuple[Any, int]:
        text, at = place
        if numbers := _NUMBERS.match(text, at):  # the ids of tokens are worth one piece
            self._count(text.count(",", at, numbers.end()) + 1)
            return self._scan_numbers(text, at - 1)
        found: tuple[Any, int] = json.decoder.JSONArray(place, self._counted(scan))  # type: ignore[attr-defined]
        return found

    def _object(self, place: tuple[str, int], strict: bool, scan: Scan, *hooks: Any) -> tuple[Any, int]:
        found: tuple[Any, int] = json.decoder.JSONObject(  # type: ignore[attr-defined]
            place, strict, self._counted(scan), *hooks
        )
        return found


def _finite(number: str) -> float:
    if not math.isfinite(float(number)):
        raise ValueError(f"{number[:40]} is no number of JSON")
    return float(number)
