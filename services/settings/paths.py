"""Makes path settings absolute, according to the marks of `protocol.paths`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from protocol.paths import PathMark
from protocol.validation import field_types, inner_dataclass
from rollout.engines.base import EngineConfig
from services.settings.sections import Settings


def resolve_paths(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the sections `values` with absolute paths.

    Args:
        values: nested tables from a file, not validated yet; values of a wrong type are not changed.
        directory: base directory of relative paths.
    """
    resolved = _resolve_table(values, Settings, directory)
    services = resolved.get("services")
    pool = services.get("pool") if isinstance(services, dict) else None
    for entry in pool if isinstance(pool, list | tuple) else ():
        if isinstance(entry, dict) and isinstance(entry.get("engine"), Mapping):
            entry["engine"] = _resolve_table(entry["engine"], EngineConfig, directory)
    return resolved


def _resolve_table(values: Mapping[str, Any], kind: type, directory: Path) -> dict[str, Any]:
    return {key: _resolve(value, field_types(kind).get(key), directory) for key, value in values.items()}


def _resolve(value: Any, hint: Any, directory: Path) -> Any:
    if isinstance(value, Mapping):
        inner = inner_dataclass(hint)
        return dict(value) if inner is None else _resolve_table(value, inner, directory)
    if isinstance(value, list | tuple):
        item_hint = next(iter(get_args(hint)), None)
        return [_resolve(item, item_hint, directory) for item in value]
    mark = path_mark(hint)
    return mark.absolute(value, directory) if mark is not None and isinstance(value, str) else value


def path_mark(hint: Any) -> PathMark | None:
    """Return the path mark of a field's type; None if the field is not a path."""
    hints = (hint, *get_args(hint))  # also for `FilePath | None`
    return next(
        (mark for item in hints for mark in getattr(item, "__metadata__", ()) if isinstance(mark, PathMark)),
        None,
    )
