"""Registers trackers by the kinds of `tracking.kind`."""

import os

from protocol.choices import Entry, Registry, load
from services.settings.tracking import SPANS
from services.tracking.base import Tracker, TrackerOptions

TRACKERS = Registry(
    {
        "tensorboard": Entry("services.tracking.tensorboard:TensorboardTracker"),
        "wandb": Entry("services.tracking.wandb:WandbTracker"),
        "mlflow": Entry("services.tracking.mlflow:MlflowTracker"),
        "trackio": Entry("services.tracking.trackio:TrackioTracker"),
        SPANS: Entry("services.tracking.opentelemetry:OpenTelemetryTracker"),
    }
)

OFFLINE = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Environment variables that disable the libraries' telemetry."""


def open_tracker(kind: str, options: TrackerOptions) -> Tracker:
    """Import a library and open the run in it. Raises the library's errors.

    Offline, the telemetry of this process's libraries is disabled, too.
    """
    if options.offline:
        os.environ.update(OFFLINE)
    tracker: Tracker = load(TRACKERS[kind].path)(options)
    return tracker
