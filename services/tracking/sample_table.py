"""Builds tables of samples for libraries with tables."""

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol.errors import TetherError
from services.run_record.group_facts import MAX_TEXT, describe_group
from services.run_record.samples import SampleBrowser
from services.run_record.tail import EventTail

log = logging.getLogger("tether.tracking")

COLUMNS = ("step", "group", "prompt", "completion", "reward", "scores", "tokens", "end")
MAX_ROWS = 32
"""Maximum number of samples per table."""
LOGGED_S = 10.0
"""Seconds to wait for the event log's commit of a step in metrics.jsonl."""
POLL_S = 0.1


class SampleTables:
    """Tables of a run's samples by step, from its files."""

    def __init__(self, run_dir: Path) -> None:
        """Start without having read anything."""
        self._tail = EventTail(run_dir)
        self._browser = SampleBrowser(run_dir, self._tail)
        self._last_missing_step = -1
        """Number of the log's newest event at the last unsuccessful wait."""
        self.waits = True
        """Whether to wait for events."""

    def rows(self, step: int) -> Sequence[Sequence[Any]]:
        """Return a row of `COLUMNS` for each of the step's first samples; none if they are not kept."""
        self._read_until(step)
        rows: list[Sequence[Any]] = []
        try:
            for message in self._browser.read_step(step):
                group = describe_group(message, step, MAX_TEXT, MAX_ROWS - len(rows))
                rows += [_row(step, group, sample) for sample in group["samples"]]
                if len(rows) >= MAX_ROWS:
                    break
        except TetherError as error:
            log.warning("tracking.samples step=%d error=%s", step, error)
        return rows

    def _read_until(self, step: int) -> None:
        """Read the event log until it contains a step, whose records cannot be found before.

        After an unsuccessful wait, the next wait requires that the log has grown.
        """
        end = time.monotonic() + LOGGED_S
        while max(self._tail.read_all().trained_steps(), default=-1) < step:
            last = self._tail.last_sequence
            if not self.waits or last == self._last_missing_step:
                return
            if time.monotonic() >= end:
                self._last_missing_step = last
                return
            time.sleep(POLL_S)


def _row(step: int, group: dict[str, Any], sample: dict[str, Any]) -> Sequence[Any]:
    scores = json.dumps(sample["components"])
    text = sample["text"], sample["reward"], scores, sample["tokens"], sample["finish_reason"]
    return (step, group["group"], group["prompt"], *text)
