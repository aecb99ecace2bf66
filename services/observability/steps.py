"""Writes and reads metrics.jsonl, which has one line for each committed step."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from protocol.codec import decode_payload
from protocol.messages import StepReport
from services.ledger.event_log.hash_chain import LINK, append
from services.observability.line_follower import LineFollower

TAIL_BYTES = 1 << 20


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
        """Write the lines to the disk, before the reports that they were made of are deleted."""
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    def backfill(self, reports: Iterable[bytes]) -> None:
        """Append the reports, encoded, of committed steps that a crash kept from being written."""
        known = {(line["step"], line["epoch"]) for line in read_lines(self._path)}
        for data in reports:
            report = decode_payload(data)
            if isinstance(report, StepReport) and (report.step, report.epoch) not in known:
                self.append(report)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield every line of a metrics file that is a step's, oldest first; incomplete lines are skipped."""
    if not path.is_file():
        return
    with path.open(errors="replace") as lines:
        for line in lines:
            if (found := parse_line(line)) is not None:
                yield found


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """Return a line of a metrics file if it is a step's; None if it is incomplete or anything else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_step = (
        isinstance(found, dict) and isinstance(found.get("step"), int) and isinstance(found.get("epoch"), str)
    )
    return {name: value for name, value in found.items() if name != LINK} if is_step else None


def read_last(path: Path) -> dict[str, Any]:
    """Return the newest line of a metrics file, of which only the end is read; empty if there is none."""
    lines, _ = LineFollower(path, TAIL_BYTES, chunk_bytes=2 * TAIL_BYTES).read()
    return next((found for line in reversed(lines) if (found := parse_line(line.data))), {})


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the last line of each step, in order of step."""
    steps = {line["step"]: line for line in read_lines(path)}
    return [steps[step] for step in sorted(steps)]


def epoch_starts(path: Path) -> dict[str, int]:
    """Return the first step of each epoch that made one, in the order of the epochs.

    An epoch that begins with a step of an epoch before began with a rewind.
    """
    starts: dict[str, int] = {}
    for line in read_lines(path):
        starts.setdefault(line["epoch"], line["step"])
    return starts
