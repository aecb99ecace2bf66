"""Defines section `[tracking]`, and says which of the libraries it names are missing."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from annotated_types import Interval
from pydantic import BeforeValidator

from protocol.errors import SettingsError
from protocol.paths import set_first

Kind = Literal["tensorboard", "wandb", "mlflow", "trackio", "opentelemetry"]
"""Library, by the name of the package's extra for it."""
SPANS: Kind = "opentelemetry"
"""The kind that gets spans in place of numbers."""
MODULES: dict[Kind, str] = {SPANS: "opentelemetry.exporter.otlp.proto.http"}
"""Kind -> the module that it imports, where that has another name."""
TABLES = ("wandb", "trackio")
"""Kinds that get tables of samples."""


def _as_list(value: Any) -> Any:
    return (value,) if isinstance(value, str) and value else value or ()


@dataclass(frozen=True, slots=True)
class TrackingConfig:
    """Section `[tracking]`: libraries that get the numbers of every step and evaluation."""

    kind: Annotated[tuple[Kind, ...], BeforeValidator(_as_list)] = set_first(())
    """Libraries, several at once: `wandb`, `tensorboard`, `trackio`, `mlflow`, and `opentelemetry`, which
    gets spans in place of numbers; one may be given as a string. Empty: none."""
    project: str = "tether"
    """Project (wandb, trackio) or experiment (mlflow) that the run belongs to."""
    name: str = ""
    """Name of the run there. Empty: run.name."""
    tags: tuple[str, ...] = ()
    """Tags of the run, where the library has them."""
    offline: bool = False
    """Whether all data stays in RUN_DIR/tracking: wandb and trackio do not send, mlflow ignores
    MLFLOW_TRACKING_URI. tensorboard always writes there."""
    samples_every: Annotated[int, Interval(ge=0, le=10**9)] = 0
    """Steps from one table of samples to the next, in wandb and trackio: prompts, completions, rewards. 0: no
    text is sent."""
    flush_s: Annotated[float, Interval(ge=0, le=3600)] = 15.0
    """Seconds in which remaining points are sent at the end of a run; the rest waits for the next start."""


def check_kinds(config: TrackingConfig) -> None:
    """Raise SettingsError if a kind is given twice."""
    if len(set(config.kind)) < len(config.kind):
        raise SettingsError(f"setting tracking.kind: a kind is given twice (got {list(config.kind)})")


def missing_libraries(config: TrackingConfig) -> list[str]:
    """Return the kinds whose library is not installed here."""
    return [kind for kind in config.kind if not is_installed(MODULES.get(kind, kind))]


def is_installed(module: str) -> bool:
    """Return whether a module is installed here; none is imported, but for its parents."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent of it
        return False
