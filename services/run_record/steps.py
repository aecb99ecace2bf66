"""Writes and reads metrics.jsonl, with one line for each committed step.

The page plots the numbers. In a long run a point represents many steps: most fields are averaged, and fields
whose extremes matter keep the maximum. Fields in no table are kept, too, so a new field of `StepReport` needs
no change here.
"""

import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from protocol.codec import decode_payload
from protocol.messages import StepReport
from services.ledger.event_log.hash_chain import LINK, append
from services.observability.bottleneck import PartTimes
from services.observability.status import SkippedSteps
from services.run_record.lines import LineFollower, read_parsed

FILE = "metrics.jsonl"
"""Name of the file in the run directory."""
TAIL_BYTES = 1 << 20
MAX_STEP = 1 << 53
"""Exclusive limit of step numbers; larger ones are inexact in browsers, and their lines are skipped."""
MAX_TIME = 253_402_300_800
"""Exclusive limit of Unix times, the year 10000; lines with later times are skipped."""
STALENESS = ("version", "lag_mean", "lag_max", "masked_share", "reward_mean", "trained_tokens", "step_s")
"""Fields of the last step's line that `step_facts` returns."""
PLACING = frozenset({"version", "step"})
"""Fields with the position of a point on the x axis."""
LARGEST = frozenset({"lag_max", "logprob_error_max", "pause_ms", "token_mult_prob_error"})
"""Fields of which a point keeps the maximum, in addition to fields whose names end in `_max`."""
LATEST = frozenset({"time"})
"""Fields of which a point keeps the last value."""
RATE_STEPS = 20
"""Number of steps for the rate and the remaining time."""
MAX_SERIES = 128
"""Maximum number of fields; further fields are ignored, so that a foreign file cannot fill the memory."""
MAX_LAGS = 64
"""Largest lag that is counted separately; larger lags count as this one."""
BY_NAME: Mapping[str, str] = {
    "dropped_by_reason": "dropped_for_",
    "reward_by_source": "reward_of_",
    "score_by_verifier": "score_by_",
}
"""Field with a table of numbers -> prefix of the names of its entries."""
_DECODER = msgspec.json.Decoder()


class StepLog:
    """Appends step reports to a file.

    After a rewind a step appears again under another epoch; the last line of a step is valid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, report: StepReport) -> None:
        """Append one line, linked to the previous line.

        Raises:
            OSError: the line cannot be written; the call may be repeated.
        """
        append(self._path, [msgspec.json.encode(report)], durable=False)

    def sync(self) -> None:
        """Sync the lines to disk. Call before the ledger forgets their reports."""
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    def backfill(self, reports: Iterable[bytes]) -> None:
        """Append encoded reports of committed steps that a crash kept from the file."""
        known = {(line["step"], line["epoch"]) for line in read_lines(self._path)}
        for data in reports:
            report = decode_payload(data)
            if isinstance(report, StepReport) and (report.step, report.epoch) not in known:
                self.append(report)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every step's line of a metrics file, oldest first; other and incomplete lines are skipped."""
    return read_parsed(path, parse_line)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse a step's line of a metrics file; return None for incomplete and other lines."""
    try:
        fields = _DECODER.decode(line)
    except (ValueError, RecursionError):  # a MsgspecError is a ValueError
        return None
    if not isinstance(fields, dict) or not isinstance(fields.get("epoch"), str):
        return None
    fields.pop(LINK, None)
    step, at = fields.get("step", -1), fields.get("time", 0)
    counts = (step, fields.get("version", 0), fields.get("groups", 0))
    is_step = all(type(count) is int for count in counts) and 0 <= step < MAX_STEP
    return fields if is_step and type(at) in (int, float) and 0 <= at < MAX_TIME else None


def read_last(path: Path) -> dict[str, Any]:
    """Return the newest line of a metrics file, reading only its end; empty without lines."""
    lines, _ = LineFollower(path, TAIL_BYTES, chunk_bytes=2 * TAIL_BYTES).read()
    return next((found for line in reversed(lines) if (found := parse_line(line.data))), {})


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the last line of each step, in order of step."""
    steps = {line["step"]: line for line in read_lines(path)}
    return [steps[step] for step in sorted(steps)]


def count_skipped(lines: Iterable[Mapping[str, Any]]) -> SkippedSteps:
    """Count the skipped steps among lines of metrics.jsonl, one line per step."""
    groups = [int(line.get("groups", 0)) for line in lines if line.get("skipped")]
    return SkippedSteps(len(groups), sum(groups))


def step_facts(run_dir: Path, is_over: bool = False) -> dict[str, Any]:
    """Return the facts that metrics.jsonl adds to `collect_status`, as JSON types.

    Returns:
        `skipped_steps`; `skipped_groups`; `last_step`: reward, rate and staleness of the last step, None
        before the first; `seconds_per_step`: unless the run is over, includes the time since the last step
        once that is longer, None before two steps; `bottleneck`: a sentence about the last steps (about all
        steps if the run is over), empty without enough steps.
    """
    lines = read_steps(run_dir / FILE)
    skipped = count_skipped(lines)
    since_s = time.time() - lines[-1].get("time", 0.0) if lines and not is_over else 0.0
    return {
        "skipped_steps": skipped.steps,
        "skipped_groups": skipped.groups,
        "seconds_per_step": step_seconds(lines, since_s),
        "last_step": {name: lines[-1].get(name) for name in STALENESS} if lines else None,
        "bottleneck": PartTimes(lines if is_over else lines[-RATE_STEPS:]).bottleneck(),
    }


def step_seconds(lines: Sequence[Mapping[str, Any]], since_s: float = 0.0) -> float | None:
    """Return the mean seconds between two steps; None before there are two steps.

    `since_s`, the seconds since the last step, counts once it exceeds the mean.
    """
    times = [line["time"] for line in lines[-RATE_STEPS:] if isinstance(line.get("time"), (int, float))]
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    span, count = float(times[-1] - times[0]), len(times) - 1
    return max(span / count, (span + since_s) / (count + 1))


def epoch_starts(path: Path) -> dict[str, int]:
    """Return the first step of each epoch that made a step, in the order of the epochs.

    An epoch whose first step belongs to an earlier epoch, too, began with a rewind.
    """
    starts: dict[str, int] = {}
    for line in read_lines(path):
        starts.setdefault(line["epoch"], line["step"])
    return starts


def numbers_of(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the names and values of a step's line that can be plotted: finite numbers, no flags or nulls.

    Entries of the tables in `BY_NAME` become separate fields, such as `dropped_for_REASON`.
    """
    parts = {
        f"{prefix}{key}": value
        for table, prefix in BY_NAME.items()
        if isinstance(found := line.get(table), dict)
        for key, value in found.items()
    }
    for name, value in {**line, **parts}.items():
        kind = type(value)
        if (kind is float or kind is int) and name not in PLACING and -1e100 < value < 1e100:
            yield name, value


def combine(name: str, total: float, value: float) -> float:
    """Combine a field's value in a point with another value: their sum, the maximum or the last value."""
    if name in LATEST:
        return value
    if name in LARGEST or name.endswith("_max"):
        return max(total, value)
    return total + value


def is_sum(name: str) -> bool:
    """Return whether a point stores the sum of a field, to be divided by the count."""
    return name not in LATEST and name not in LARGEST and not name.endswith("_max")


def rounded(value: float) -> float:
    """Round a value to seven significant digits: more are invisible and enlarge answers."""
    if value == 0 or isinstance(value, int):
        return value
    return round(value, 6 - math.floor(math.log10(abs(value))))
