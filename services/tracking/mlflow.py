"""Sends points to an MLflow tracking server, or to a local store in the run directory."""

import os
from collections.abc import Iterator, Sequence
from itertools import islice

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from services.tracking.base import TrackedPoint, TrackerOptions

BATCH = 1000
"""Maximum number of metrics per call."""
PARAM_BATCH = 100
PARAM_LENGTH = 500
"""Maximum number of characters of a parameter that every store accepts."""


class MlflowTracker:
    """A run in MLflow."""

    def __init__(self, options: TrackerOptions) -> None:
        """Create or continue the run, in the experiment `tracking.project`."""
        remote = "" if options.offline else os.environ.get("MLFLOW_TRACKING_URI", "")
        self.url = remote or f"sqlite:///{options.directory}/mlflow.db"
        self._client = MlflowClient(tracking_uri=self.url)
        if options.run_id:
            self.run_id = options.run_id
            self._client.update_run(self.run_id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(options.project)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(options.project)
        )
        self.run_id = self._client.create_run(experiment_id, run_name=options.name).info.run_id
        tags = [RunTag(tag, "true") for tag in options.tags]
        self._client.log_batch(self.run_id, tags=tags)
        params = (Param(name, str(value)[:PARAM_LENGTH]) for name, value in options.settings.items())
        while batch := list(islice(params, PARAM_BATCH)):
            self._client.log_batch(self.run_id, params=batch)

    def log(self, points: Sequence[TrackedPoint]) -> None:
        """Add points. A repeated version has two values, of which MLflow shows the later."""
        metrics = _metrics(points)
        while batch := list(islice(metrics, BATCH)):
            self._client.log_batch(self.run_id, metrics=batch)

    def close(self) -> None:
        """Mark the run as finished; continuing it resets the status."""
        self._client.set_terminated(self.run_id)


def _metrics(points: Sequence[TrackedPoint]) -> Iterator[Metric]:
    for point in points:
        for name, value in point.numbers.items():
            yield Metric(name, value, int(point.time * 1000), point.version)
