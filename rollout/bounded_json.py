"""Parses untrusted JSON with a limit on the number of values.

Every parsed value can be serialized again. The parser of the standard library holds the GIL until the whole
document is parsed. Large documents are therefore parsed by its Python implementation, which stops at the
limit.
"""

import json
import json.decoder
import json.scanner
import math
import re
from collections.abc import Callable
from typing import Any

WHOLE = 1 << 16
"""Documents up to this number of characters are parsed in one piece."""
MAX_VALUES = 100_000
"""Limit on the values of a larger document, in addition to the values that the caller expects."""
_NUMBERS = re.compile(r"[0-9,\s]*\]")

Scan = Callable[[str, int], tuple[Any, int]]


class TooManyValues(ValueError):
    """JSON with more values than the limit."""


def parsed_json(text: str, extra_values: int = 0) -> Any:
    """Parse JSON, and check that the result can be serialized again.

    Args:
        extra_values: values allowed in addition to `MAX_VALUES`, such as the tokens of a context.

    Raises:
        TooManyValues: the document has more values than allowed.
        ValueError: the document is not JSON, a number is not finite, or a string contains half of a surrogate
            pair.
        RecursionError: the document is nested too deeply.
    """
    if len(text) <= WHOLE:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    else:
        value = _BoundedDecoder(MAX_VALUES + extra_values).decode(text)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


class _BoundedDecoder(json.JSONDecoder):
    """JSON decoder that counts the values in arrays and objects, for one document."""

    def __init__(self, max_values: int) -> None:
        super().__init__(parse_float=_finite, parse_constant=_finite)
        self._max_values = self._left = max_values
        self._scan_numbers: Scan = self.scan_once
        self.parse_array: Any = self._array
        self.parse_object: Any = self._object
        self.scan_once: Scan = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _count(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise TooManyValues(f"over {self._max_values} values")

    def _counted(self, scan: Scan) -> Scan:
        def scan_next(text: str, at: int) -> tuple[Any, int]:
            self._count(1)
            return scan(text, at)

        return scan_next

    def _array(self, place: tuple[str, int], scan: Scan) -> tuple[Any, int]:
        text, at = place
        if numbers := _NUMBERS.match(text, at):  # parse a list of token ids in one piece
            self._count(text.count(",", at, numbers.end()) + 1)
            return self._scan_numbers(text, at - 1)
        value: tuple[Any, int] = json.decoder.JSONArray(place, self._counted(scan))  # type: ignore[attr-defined]
        return value

    def _object(self, place: tuple[str, int], strict: bool, scan: Scan, *hooks: Any) -> tuple[Any, int]:
        value: tuple[Any, int] = json.decoder.JSONObject(  # type: ignore[attr-defined]
            place, strict, self._counted(scan), *hooks
        )
        return value


def _finite(number: str) -> float:
    if not math.isfinite(float(number)):
        raise ValueError(f"{number[:40]} is not a JSON number")
    return float(number)
