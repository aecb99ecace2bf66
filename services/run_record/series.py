"""Says which numbers of a step the page can show, and how several steps become one point.

A point of a long run stands for many steps. Most numbers are averaged over them; where the extreme matters,
the largest is kept. Fields that no table names are kept, too: a new field of `StepReport` needs no change.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = frozenset({"version", "step"})
"""Fields that place a point on the x axis."""
LARGEST = frozenset({"lag_max", "logprob_error_max", "pause_ms", "token_mult_prob_error"})
"""Fields of which the largest of several steps is kept; also every field whose name ends with `_max`."""
LATEST = frozenset({"time"})
"""Fields of which the last of several steps is kept."""
MAX_SERIES = 64
"""Names that are kept; further ones are ignored, so that a foreign file cannot fill the memory."""
MAX_LAGS = 64
"""Largest lag that is counted for itself; larger ones count as this one."""


def numbers_of(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the names and values of a step's line that can be drawn: finite numbers, no flags, no nulls.

    Drops by reason become a field each, `dropped_for_REASON`.
    """
    reasons = line.get("dropped_by_reason")
    drops = {f"dropped_for_{reason}": n for reason, n in reasons.items()} if isinstance(reasons, dict) else {}
    for name, value in {**line, **drops}.items():
        kind = type(value)
        if (kind is float or kind is int) and name not in HIDDEN and -1e100 < value < 1e100:
            yield name, value


def combine(name: str, total: float, value: float) -> float:
    """Return what a point keeps of a field after one more value: a sum, the largest or the last."""
    if name in LATEST:
        return value
    if name in LARGEST or name.endswith("_max"):
        return max(total, value)
    return total + value


def is_sum(name: str) -> bool:
    """Return whether a point keeps the sum of a field, to be divided by the number of values."""
    return name not in LATEST and name not in LARGEST and not name.endswith("_max")


def rounded(value: float) -> float:
    """Return a value with seven significant digits: more cannot be seen, and digits are bytes on the wire."""
    if value == 0 or isinstance(value, int):
        return value
    return round(value, 6 - math.floor(math.log10(abs(value))))
