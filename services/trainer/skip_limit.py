"""Finds out when so many steps were skipped in a row that a run would end without having learned anything."""

from protocol.messages import StepReport
from services.observability.skipped_steps import halt_cause


class SkipLimit:
    """Counts skipped steps in a row; a step that is not skipped, and a halt, begin a new count."""

    def __init__(self, limit: int) -> None:
        """Count from 0; `limit` is `trainer.max_skipped_steps`."""
        self._limit = limit
        self._in_row = 0

    def cause_after(self, report: StepReport) -> str:
        """Count a committed step; return the cause to halt the run for, empty while there is none."""
        self._in_row = self._in_row + 1 if report.skipped else 0
        if self._in_row < self._limit:
            return ""
        found, self._in_row = self._in_row, 0
        return halt_cause(found, report.skipped)
