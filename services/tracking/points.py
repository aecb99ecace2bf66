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
"""Maximum number of numbers per line, so that a foreign file cannot create endless names."""
HIDDEN = frozenset({"step", "version", "time"})
"""Fields that determine a point's place."""
_FOREIGN = re.compile(r"[^\w./ -]")
"""Characters that some libraries do not allow in names."""


class PointReader:
    """Reader of a run's points."""

    files: tuple[str, ...] = (METRICS, EVALUATIONS)

    def __init__(self, run_dir: Path, samples_every: int = 0) -> None:
        """Add samples to a point every `samples_every` steps; 0: never."""
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
        """Stop waiting for the event log."""
        self._tables.waits = False


def point_of(file: str, data: bytes, ordinal: int) -> TrackedPoint | None:
    """Parse a line of metrics.jsonl or eval.jsonl; return None for other lines.

    Args:
        file: name of the file. Numbers in eval.jsonl get the prefix eval/SET/, others train/.
        data: line to parse.
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
    """Flatten nested tables by dotted name; lists become JSON."""
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
