"""Reads points from lines of metrics.jsonl and eval.jsonl."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.run_record.evaluations import FILE as EVALUATIONS
from services.run_record.steps import FILE as METRICS
from services.tracking.base import TrackedPoint
from services.tracking.sample_table import SampleTables

MAX_NUMBERS = 500
"""Numbers of a line that are kept; a foreign file cannot make endless names."""
HIDDEN = frozenset({"step", "version", "time"})
"""Fields that place a point."""
_FOREIGN = re.compile(r"[^\w./ -]")
"""Characters that not every library allows in a name."""


class PointReader:
    """Reader of a run's points."""

    files: tuple[str, ...] = (METRICS, EVALUATIONS)

    def __init__(self, run_dir: Path, samples_every: int = 0) -> None:
        """`samples_every` steps a point has samples; 0: none has."""
        self._every = samples_every
        self._tables = SampleTables(run_dir)

    def items(self, file: str, data: bytes, ordinal: int) -> list[TrackedPoint]:
        """Return the point of a line, if it has one."""
        point = point_of(file, data, ordinal)
        if point is None:
            return []
        if file == METRICS and self._every and point.version % self._every == 0:
            point = point._replace(samples=self._tables.rows(point.version - 1))
        return [point]

    def version_of(self, item: TrackedPoint) -> int | None:
        """Return the version of a step's point."""
        return item.version if any(name.startswith("train/") for name in item.numbers) else None

    def finish(self) -> None:
        """Take the event log as it is."""
        self._tables.waits = False


def point_of(file: str, data: bytes, ordinal: int) -> TrackedPoint | None:
    """Return the point of a line; None if it is not a line of a step or an evaluation.

    Args:
        file: name of the file: lines of eval.jsonl are named eval/SET/..., others train/...
        data: the line.
        ordinal: number of the point.
    """
    try:
        line = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(version := line.get("version"), int) or version < 0:
        return None
    prefix = f"eval/{line.get('set', 'held-out')}" if file == EVALUATIONS else "train"
    numbers: dict[str, float] = {}
    for name, value in _numbers({name: line[name] for name in line if name not in HIDDEN}, prefix):
        if len(numbers) < MAX_NUMBERS:
            numbers[_FOREIGN.sub("_", name)] = value
    time = line.get("time")
    return TrackedPoint(ordinal, version, float(time) if isinstance(time, (int, float)) else 0.0, numbers)


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, by dotted name; lists become JSON."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flat_settings(value, f"{prefix}{name}.")
        elif value is not None:
            flat[f"{prefix}{name}"] = json.dumps(value) if isinstance(value, list | tuple) else value
    return flat


def _numbers(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}/{name}")
        elif type(value) in (int, float) and math.isfinite(value):
            yield f"{prefix}/{name}", float(value)
