"""Defines section `[tracking]`, and finds missing tracking libraries."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import BeforeValidator

from protocol.errors import SettingsError
from protocol.paths import basic_setting

Kind = Literal["tensorboard", "wandb", "mlflow", "trackio", "opentelemetry"]
"""Tracking library, named after the package's extra."""
SPANS: Kind = "opentelemetry"
"""Kind that gets spans instead of numbers."""
MODULES: dict[Kind, str] = {SPANS: "opentelemetry.exporter.otlp.proto.http"}
"""Kind -> imported module, if its name differs."""
TABLES = ("wandb", "trackio")
"""Kinds that get tables of samples."""


def _as_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) and value else value or ()


@dataclass(frozen=True, slots=True)
class TrackingConfig:
    """Section `[tracking]`: libraries that get the metrics of every step and evaluation."""

    kind: Annotated[tuple[Kind, ...], BeforeValidator(_as_list)] = basic_setting(())
    """Tracking libraries: `wandb`, `tensorboard`, `trackio`, `mlflow`, and `opentelemetry`, which gets spans
    instead of numbers. A list, or one name as a string. Empty: none."""
    project: str = "tether"
    """Project (wandb, trackio) or experiment (mlflow) of the run."""
    name: str = ""
    """Name of the run in the tracking library. Empty: run.name."""
    tags: tuple[str, ...] = ()
    """Tags of the run, in libraries with tags."""
    offline: bool = False
    """Whether all data stays in RUN_DIR/tracking: wandb and trackio do not send, mlflow ignores
    MLFLOW_TRACKING_URI. tensorboard always writes to this directory."""
    samples_every: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """Steps between two tables of samples in wandb and trackio: prompts, completions, rewards. 0: no text is
    sent."""
    flush_s: Annotated[float, Interval(ge=0, le=3600)] = 15.0
    """Seconds for sending remaining points at the end of a run; unsent points wait for the next start."""


def check_kinds(config: TrackingConfig) -> None:
    """Raise SettingsError if a kind is given twice."""
    if len(set(config.kind)) < len(config.kind):
        raise SettingsError(f"setting tracking.kind: a kind is given twice (got {list(config.kind)})")


def missing_libraries(config: TrackingConfig) -> list[str]:
    """Return the kinds whose library is not installed."""
    return [kind for kind in config.kind if not is_installed(MODULES.get(kind, kind))]


def is_installed(module: str) -> bool:
    """Return whether a module is installed, without importing it (parent packages are imported)."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
