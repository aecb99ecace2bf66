"""Writes and reads metrics.jsonl, which has one line for each committed step.

The page draws the numbers of a line. A point of a long run stands for many steps: most numbers are averaged
over them; where the extreme matters, the largest is kept. Fields that no table names are kept, too: a new
field of `StepReport` needs no change.
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
"""In the run directory."""
TAIL_BYTES = 1 << 20
MAX_STEP = 1 << 53
"""Steps from here on are not exact numbers in a browser; lines with them are skipped."""
MAX_TIME = 253_402_300_800
"""Unix time of the year 10000, which no calendar here shows; lines of times from here on are skipped."""
STALENESS = ("version", "lag_mean", "lag_max", "masked_share", "reward_mean", "trained_tokens", "step_s")
"""Fields of the last step's line that `step_facts` returns."""
PLACING = frozenset({"version", "step"})
"""Fields that place a point on the x axis."""
LARGEST = frozenset({"lag_max", "logprob_error_max", "pause_ms", "token_mult_prob_error"})
"""A point keeps the largest value of these fields, and of every field whose name ends with `_max`."""
LATEST = frozenset({"time"})
"""A point keeps the last value of these fields."""
RATE_STEPS = 20
"""Steps that the rate and the remaining time are computed from."""
MAX_SERIES = 128
"""Names that are kept; further ones are ignored, so that a foreign file cannot fill the memory."""
MAX_LAGS = 64
"""Largest lag that is counted for itself; larger ones count as this one."""
BY_NAME: Mapping[str, str] = {
    "dropped_by_reason": "dropped_for_",
    "reward_by_source": "reward_of_",
    "score_by_verifier": "score_by_",
}
"""Field with a table of numbers -> beginning of the names that its entries have as numbers of a line."""
_DECODER = msgspec.json.Decoder()


class StepLog:
    """Appends step reports to a file.

    After a rewind a step appears again, with another epoch; the last line of a step is the valid one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, report: StepReport) -> None:
        """Write one line, linked to the one before it.

        Raises:
            OSError: it cannot be written, and may be written again.
        """
        append(self._path, [msgspec.json.encode(report)], durable=False)

    def sync(self) -> None:
        """Sync the lines to the disk, before the ledger forgets their reports."""
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    def backfill(self, reports: Iterable[bytes]) -> None:
        """Append encoded reports of committed steps whose lines a crash prevented."""
        known = {(line["step"], line["epoch"]) for line in read_lines(self._path)}
        for data in reports:
            report = decode_payload(data)
            if isinstance(report, StepReport) and (report.step, report.epoch) not in known:
                self.append(report)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every line of a metrics file that is a step's, oldest first; incomplete lines are skipped."""
    return read_parsed(path, parse_line)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return a line of a metrics file if it is a step's; None if it is incomplete or anything else."""
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
    """Return the newest line of a metrics file, reading only its end; empty if there is none."""
    lines, _ = LineFollower(path, TAIL_BYTES, chunk_bytes=2 * TAIL_BYTES).read()
    return next((found for line in reversed(lines) if (found := parse_line(line.data))), {})


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the last line of each step, in order of step."""
    steps = {line["step"]: line for line in read_lines(path)}
    return [steps[step] for step in sorted(steps)]


def count_skipped(lines: Iterable[Mapping[str, Any]]) -> SkippedSteps:
    """Count the skipped steps among lines of metrics.jsonl, one for each step."""
    groups = [int(line.get("groups", 0)) for line in lines if line.get("skipped")]
    return SkippedSteps(len(groups), sum(groups))


def step_facts(run_dir: Path, is_over: bool = False) -> dict[str, Any]:
    """Return what metrics.jsonl adds to `collect_status`, as JSON types.

    Returns:
        `skipped_steps`, `skipped_groups`, and `last_step`: reward, rate and staleness of the last step, or
        None before there is a step, and `seconds_per_step`, the time since the last one included once it is
        longer; None before there are two. `bottleneck` is a sentence about the last steps, of a run that is
        over about all of them; empty before there are some.
    """
    lines = read_steps(run_dir / FILE)
    skipped = count_skipped(lines)
    return {
        "skipped_steps": skipped.steps,
        "skipped_groups": skipped.groups,
        "seconds_per_step": step_seconds(lines, time.time() - lines[-1].get("time", 0.0)) if lines else None,
        "last_step": {name: lines[-1].get(name) for name in STALENESS} if lines else None,
        "bottleneck": PartTimes(lines if is_over else lines[-RATE_STEPS:]).bottleneck(),
    }


def step_seconds(lines: Sequence[Mapping[str, Any]], since_s: float = 0.0) -> float | None:
    """Return the mean seconds from one step to the next; None before there are two.

    `since_s`, the seconds since the last one, counts once they are longer than that.
    """
    times = [line["time"] for line in lines[-RATE_STEPS:] if isinstance(line.get("time"), (int, float))]
    if len(times) < 2 or times[-1] <= times[0]:
        return None
    span, count = float(times[-1] - times[0]), len(times) - 1
    return max(span / count, (span + since_s) / (count + 1))


def epoch_starts(path: Path) -> dict[str, int]:
    """Return the first step of each epoch that made one, in the order of the epochs.

    An epoch that begins with a step of an epoch before began with a rewind.
    """
    starts: dict[str, int] = {}
    for line in read_lines(path):
        starts.setdefault(line["epoch"], line["step"])
    return starts


def numbers_of(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the names and values of a step's line that can be drawn: finite numbers, no flags, no nulls.

    Entries of the tables in `BY_NAME` become a field each, such as `dropped_for_REASON`.
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
    """Combine a point's value of a field with one more value: to their sum, the larger or the last."""
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
