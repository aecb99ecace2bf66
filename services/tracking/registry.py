"""Finds trackers by the kinds that `tracking.kind` names."""

from collections.abc import Callable
from importlib import import_module

from services.tracking.base import Tracker, TrackerOptions

TRACKERS = {
    "tensorboard": "services.tracking.tensorboard:TensorboardTracker",
    "wandb": "services.tracking.wandb:WandbTracker",
    "mlflow": "services.tracking.mlflow:MlflowTracker",
    "trackio": "services.tracking.trackio:TrackioTracker",
}


def open_tracker(kind: str, options: TrackerOptions) -> Tracker:
    """Import a library and open the run in it. Raises whatever the library raises."""
    module, _, name = TRACKERS[kind].partition(":")
    make: Callable[[TrackerOptions], Tracker] = getattr(import_module(module), name)
    return make(options)
