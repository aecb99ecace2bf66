"""Finds trackers by the kinds that `tracking.kind` names."""

import os
from collections.abc import Callable
from importlib import import_module

from services.tracking.base import Tracker, TrackerOptions

TRACKERS = {
    "tensorboard": "services.tracking.tensorboard:TensorboardTracker",
    "wandb": "services.tracking.wandb:WandbTracker",
    "mlflow": "services.tracking.mlflow:MlflowTracker",
    "trackio": "services.tracking.trackio:TrackioTracker",
}

OFFLINE = {
    "DO_NOT_TRACK": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Variables that keep libraries from reporting on their own use."""


def open_tracker(kind: str, options: TrackerOptions) -> Tracker:
    """Import a library and open the run in it. Raises the library's own errors.

    Offline, this process's libraries do not report their own use, either.
    """
    if options.offline:
        os.environ.update(OFFLINE)
    module, _, name = TRACKERS[kind].partition(":")
    make: Callable[[TrackerOptions], Tracker] = getattr(import_module(module), name)
    return make(options)
