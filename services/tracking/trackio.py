"""Writes points to a local trackio database, or sends them to the Space in TRACKIO_SPACE_ID."""

import os
import secrets
from collections.abc import Sequence

from services.tracking.base import TrackedPoint, TrackerOptions
from services.tracking.sample_table import COLUMNS

DIRECTORY = "TRACKIO_DIR"
"""Environment variable with the directory of trackio's databases; read when trackio is imported."""
SPACE = "TRACKIO_SPACE_ID"


class TrackioTracker:
    """A run in trackio."""

    def __init__(self, options: TrackerOptions) -> None:
        """Open or continue the run, without output or questions."""
        if options.offline:
            os.environ[DIRECTORY] = str(options.directory)
            os.environ.pop(SPACE, None)
        import trackio

        self.run_id = options.run_id or f"{options.name}-{secrets.token_hex(3)}"  # two may have one name
        self._run = trackio.init(
            project=options.project,
            name=self.run_id,
            config=dict(options.settings),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        self.url = f"trackio show --project {options.project}"

    def log(self, points: Sequence[TrackedPoint]) -> None:
        """Add points."""
        from trackio import Table

        for point in points:
            rows = [list(row) for row in point.samples]
            table = {"samples": Table(columns=list(COLUMNS), data=rows)} if rows else {}
            self._run.log({**point.numbers, **table}, step=point.version)

    def close(self) -> None:
        """Write the remaining points."""
        self._run.finish()
