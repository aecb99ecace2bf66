"""Keeps the history of a run in bounded memory, and sends readers only the changes.

metrics.jsonl may have a million lines; the page plots at most `MAX_POINTS`. A point represents `width` steps,
a power of two that doubles when there are too many points. Every line increments the revision, and each point
stores the revision of its last change.
"""

import secrets
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from services.observability.bottleneck import PartTimes
from services.observability.durations import rate_text
from services.run_record.lines import FollowedLine, LineFollower
from services.run_record.steps import (
    LATEST,
    MAX_LAGS,
    MAX_SERIES,
    RATE_STEPS,
    combine,
    is_sum,
    numbers_of,
    parse_line,
    rounded,
    step_seconds,
)

MAX_POINTS = 2000
MAX_WARNINGS = 50


class Point:
    """Aggregate of the steps `start` to `start + width - 1`."""

    __slots__ = ("counts", "lags", "offset", "revision", "skipped", "start", "totals")

    def __init__(self, start: int, offset: int) -> None:
        self.start = start
        self.offset = offset
        """Byte offset of the point's first line in metrics.jsonl."""
        self.revision = 0
        self.totals: dict[str, float] = {}
        """Field -> its values combined by `combine`."""
        self.counts: dict[str, int] = {}
        """Field -> number of its values."""
        self.lags: dict[int, float] = {}
        """Lag in versions -> number of trained tokens."""
        self.skipped = 0
        """Number of steps that changed no weights."""

    def add(self, line: dict[str, Any], names: set[str]) -> None:
        """Add one step; `names` are the known fields and grows up to `MAX_SERIES`."""
        self._add_number("step", line["step"])
        self.skipped += bool(line.get("skipped"))
        for name, value in numbers_of(line):
            if name not in names:
                if len(names) >= MAX_SERIES:
                    continue
                names.add(name)
            self._add_number(name, value)
        histogram = line.get("lag_histogram")
        if isinstance(histogram, dict):
            for lag, tokens in histogram.items():
                if isinstance(lag, str) and lag.isdecimal() and isinstance(tokens, int):
                    key = min(int(lag[:9]), MAX_LAGS)
                    self.lags[key] = self.lags.get(key, 0) + tokens

    def absorb(self, other: "Point") -> None:
        """Add the steps of the next point."""
        for name, total in other.totals.items():
            self.totals[name] = combine(name, self.totals[name], total) if name in self.totals else total
            self.counts[name] = self.counts.get(name, 0) + other.counts[name]
        for lag, tokens in other.lags.items():
            self.lags[lag] = self.lags.get(lag, 0) + tokens
        self.skipped += other.skipped
        self.revision = max(self.revision, other.revision)

    def value(self, name: str) -> float | None:
        """Return the mean, maximum or last value of a field; None if no step has the field."""
        if name not in self.totals:
            return None
        total = self.totals[name]
        if name in LATEST:  # rounding to seven digits would shift times by minutes
            return total
        return rounded(total / self.counts[name] if is_sum(name) and self.counts[name] > 1 else total)

    def _add_number(self, name: str, value: float) -> None:
        self.totals[name] = combine(name, self.totals[name], value) if name in self.totals else value
        self.counts[name] = self.counts.get(name, 0) + 1


class History:
    """Points of metrics.jsonl. Methods block briefly and are thread-safe."""

    def __init__(self, path: Path, max_points: int = MAX_POINTS) -> None:
        """Store the arguments; `path` need not exist."""
        self._follower = LineFollower(path)
        self._starts = 0
        self._max_points = max_points
        self._lock = threading.Lock()
        self._reset()

    def read_more(self) -> bool:
        """Read the next part of the file; return whether more can be read at once."""
        lines, more = self._follower.read()
        with self._lock:
            if self._follower.starts != self._starts:
                if self._starts:
                    self._reset()
                self._starts = self._follower.starts
            for line in lines:
                self._add(line)
            self.is_complete = not more
        return more

    def since(self, revision: int) -> dict[str, Any]:
        """Return the points changed after `revision` (0: all), as columns for `/steps.json`.

        Returns:
            `id` (changes when the file is replaced), `revision` (the next request's revision), `width`,
            `reset` (whether the reader must discard its points), `columns` (field -> values, None if
            missing), `lags` (rows of lag and tokens for each point), `last` (newest line of the file),
            `skipped` (number of steps that changed no weights), `complete` (whether the file was read to its
            end).
        """
        with self._lock:
            reset = revision < self._reset_revision or revision > self._revision or revision == 0
            points = [point for point in self._points if reset or point.revision > revision]
            columns: dict[str, list[float | None]] = {"start": [point.start for point in points]}
            for name in ("step", *sorted(self._names)):
                columns[name] = [point.value(name) for point in points]
            return {
                "id": self._id,
                "revision": self._revision,
                "width": self._width,
                "reset": reset,
                "columns": columns,
                "lags": [sorted(point.lags.items()) for point in points],
                "last": self._last,
                "skipped": sum(point.skipped for point in self._points),
                "complete": self.is_complete,
            }

    def warnings(self) -> list[dict[str, Any]]:
        """Return the newest warnings of steps, oldest first, as events for the page."""
        with self._lock:
            return list(self._warnings)

    def pace(self, run_state: str, remaining_steps: int) -> dict[str, str]:
        """Return `rate`, as in the live view, and `bottleneck`, for `/status.json`.

        Args:
            run_state: state of the run. If it is not "running", the bottleneck covers all steps.
            remaining_steps: number of remaining steps.
        """
        with self._lock:
            lines, is_on = list(self._recent), run_state == "running"
            newest_s = lines[-1].get("time") if lines else None
            each = None
            if is_on and isinstance(newest_s, (int, float)):
                each = step_seconds(lines, time.time() - newest_s)
            return {
                "rate": "" if each is None else rate_text(each, remaining_steps),
                "bottleneck": (PartTimes(lines) if is_on else self._times).bottleneck(),
            }

    @property
    def last(self) -> dict[str, Any]:
        """Line of the newest step; empty before the first step."""
        return self._last

    def _reset(self) -> None:
        self._id = secrets.token_hex(4)
        self._points: list[Point] = []
        self._width = 1
        self._revision = 0
        self._reset_revision = 0
        """Readers with an older revision need all points: the width has changed, or points were removed."""
        self._names: set[str] = set()
        self._last: dict[str, Any] = {}
        self._last_step = -1
        self._warnings: deque[dict[str, Any]] = deque(maxlen=MAX_WARNINGS)
        self._recent: deque[dict[str, Any]] = deque(maxlen=RATE_STEPS)
        self._times = PartTimes()
        self.is_complete = False

    def _add(self, followed: FollowedLine) -> None:
        line = parse_line(followed.data)
        if line is None:
            return
        self._revision += 1
        step = line["step"]
        if self._points and step <= self._last_step:
            rewound = line["epoch"] != self._last["epoch"]
            self._rebuild(step, rewound, followed)
            if not rewound:  # a corrected step, which `_rebuild` has read
                self._last = line if step == self._last_step else self._last
                return
        self._last, self._last_step = line, step
        self._warnings.extend(_warnings_of(line))
        self._recent.append(line)
        self._times.add(line)
        start = step // self._width * self._width
        if not self._points or self._points[-1].start != start:
            self._points.append(Point(start, followed.offset))
        self._points[-1].add(line, self._names)
        self._points[-1].revision = self._revision
        while len(self._points) > self._max_points:
            self._widen()

    def _widen(self) -> None:
        """Double the number of steps per point."""
        self._width *= 2
        wider: list[Point] = []
        for point in self._points:
            point.start = point.start // self._width * self._width
            if wider and wider[-1].start == point.start:
                wider[-1].absorb(point)
            else:
                wider.append(point)
        self._points = wider
        self._reset_revision = self._revision

    def _rebuild(self, step: int, rewound: bool, line: FollowedLine) -> None:
        """Rebuild the point of `step` from the file, after a line for an earlier step.

        After a rewind (`rewound`) the points from `step` on are of an abandoned branch and are removed.
        """
        self._reset_revision = self._revision
        start = step // self._width * self._width
        index = bisect_left(self._points, start, key=lambda point: point.start)
        exists = index < len(self._points) and self._points[index].start == start
        point = Point(start, self._points[index].offset if exists else line.offset)
        point.revision = self._revision
        limit = step if rewound else start + self._width
        for earlier in self._lines_of(range(start, limit), point.offset, line.offset + len(line.data)):
            point.add(earlier, self._names)
        end = len(self._points) if rewound else index + exists
        self._points[index:end] = [point] if point.totals else []

    def _lines_of(self, steps: range, offset: int, end: int) -> Iterable[dict[str, Any]]:
        """Return the last line of each of `steps` between two offsets of the file, in order of step."""
        by_step: dict[int, dict[str, Any]] = {}
        try:
            with self._follower.path.open("rb") as file:
                file.seek(offset)
                while offset < end and (data := file.readline()):
                    offset += len(data)
                    line = parse_line(data)
                    if line is not None and line["step"] in steps:
                        by_step[line["step"]] = line
        except OSError:
            return []
        return [by_step[step] for step in sorted(by_step)]


def _warnings_of(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the warnings of a step's line as events for the page."""
    texts, time_s = line.get("warnings", []), line.get("time")
    if isinstance(texts, list) and isinstance(time_s, (int, float)):
        if line.get("skipped"):
            texts = [
                f"Step {line['step']} was skipped and changed no weights: {line['skipped']}.",
                *texts,
            ]
        for text in texts[:10]:
            yield warning_event(time_s, str(text))


def warning_event(time_s: float, text: str) -> dict[str, Any]:
    """Return a warning at a Unix time as an event for the page."""
    fields = {"kind": "warning", "topic": "run", "level": "warn"}
    return {"seq": 0, "time_ms": int(time_s * 1000), **fields, "text": text[:400]}
