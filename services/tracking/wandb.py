"""Sends points to Weights & Biases, or writes its offline files."""

import secrets
from collections.abc import Sequence

import wandb

from services.tracking.base import TrackedPoint, TrackerOptions
from services.tracking.sample_table import COLUMNS

X_AXIS = "version"


class WandbTracker:
    """A run in wandb. Offline each start adds a directory with the same run id, for `wandb sync --append`."""

    def __init__(self, options: TrackerOptions) -> None:
        """Open or continue the run. Without a key and a terminal wandb raises instead of asking."""
        self.run_id = options.run_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=options.project,
            name=options.name,
            id=self.run_id,
            resume=None if options.offline else "allow",
            mode="offline" if options.offline else None,
            tags=list(options.tags),
            config=dict(options.settings),
            dir=str(options.directory),
            settings=wandb.Settings(console="off", disable_git=True, silent=True),
        )
        self._run.define_metric(X_AXIS)
        self._run.define_metric("*", step_metric=X_AXIS)
        folder = f"wandb sync --append {options.directory}/wandb/offline-run-*"
        self.url = folder if options.offline else self._run.url or folder

    def log(self, points: Sequence[TrackedPoint]) -> None:
        """Add points; wandb ignores points with a known ordinal."""
        for point in points:
            rows = [list(row) for row in point.samples]
            table = {"samples": wandb.Table(list(COLUMNS), rows)} if rows else {}
            self._run.log({**point.numbers, **table, X_AXIS: point.version}, step=point.ordinal)

    def close(self) -> None:
        """Send the remaining points; wandb waits for its server."""
        self._run.finish()
