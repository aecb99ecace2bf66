"""Reads the scores of versions for the page: each is a point of the step that made the version."""

import threading
from typing import Any

from services.observability.evaluations import FILE, Evaluation, read_evaluations
from services.settings.sections import Settings

MAX_ROWS = 4000
"""Newest lines of eval.jsonl that are shown."""
MAX_SCORE = 1e100


class ScoredVersions:
    """The newest lines of eval.jsonl. Methods block for a moment and may be called from any thread."""

    def __init__(self, settings: Settings) -> None:
        """Read nothing yet; the file need not exist."""
        self._run_dir = settings.run_dir
        self._lock = threading.Lock()
        self._read = (0, 0)
        """Size and time of the file when it was read."""
        self._rows: list[dict[str, Any]] = []
        self._first = 0
        """Lines before the first of `_rows`."""

    def since(self, after: int) -> dict[str, Any]:
        """Return the lines after the first `after` ones, for `/evaluations.json`.

        Returns:
            `rows` (step, set and scores), `last` to ask with next, `reset` (whether the reader has to forget
            what it has, because the file was replaced).
        """
        with self._lock:
            self._refresh()
            last = self._first + len(self._rows)
            reset = after > last
            return {
                "rows": self._rows[0 if reset else max(0, after - self._first) :],
                "last": last,
                "reset": reset,
            }

    def _refresh(self) -> None:
        try:
            status = (self._run_dir / FILE).stat()
        except OSError:
            self._read, self._rows, self._first = (0, 0), [], 0
            return
        if (status.st_size, status.st_mtime_ns) != self._read:
            rows = [_row(evaluation) for evaluation in read_evaluations(self._run_dir)]
            self._first = max(0, len(rows) - MAX_ROWS)
            self._read, self._rows = (status.st_size, status.st_mtime_ns), rows[self._first :]


def _row(evaluation: Evaluation) -> dict[str, Any]:
    scores = {"greedy": evaluation.greedy, "sampled": evaluation.sampled}
    return {
        "step": max(evaluation.version - 1, 0),
        "set": evaluation.set,
        **{name: v for name, v in scores.items() if v is not None and -MAX_SCORE < v < MAX_SCORE},
    }
