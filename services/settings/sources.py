"""Where settings come from: a file, `TETHER_*` variables, and `section.key=value` texts. What they mean is
`settings.py`'s business."""

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from protocol.errors import SettingsError

SHORT_NAMES = {
    "TETHER_MAX_STALENESS": "bound.max_staleness",
    "TETHER_GROUPS_PER_STEP": "bound.groups_per_step",
    "TETHER_STALENESS_POLICY": "bound.staleness_policy",
    "TETHER_MAX_ATTEMPTS": "bound.max_attempts",
    "TETHER_REDIS_URL": "ledger.url",
    "TETHER_RUN": "run.name",
    "TETHER_RUN_DIR": "run.dir",
    "TETHER_STEPS": "run.steps",
}
OTHER_VARIABLES = frozenset({"TETHER_CONFIG", "TETHER_LOG_LEVEL", "TETHER_INSTANCE"})
"""Variables that are read elsewhere: the settings file, the log level, and the name of this process among its
like."""


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML or JSON file. Raises SettingsError, naming the file."""
    try:
        text = path.read_text()
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SettingsError(
            f"settings file {path}: {error.strerror}; give the path of a TOML file such as deploy/configs/demo.toml"
        ) from None
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {path}: {error}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"settings file {path}: expected tables at the top level")
    return values


def from_environ(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(section.key, text, variable) of every `TETHER_*` variable that sets something. Raises SettingsError
    for an unknown one."""
    found = []
    for name, text in sorted(environ.items()):
        if not name.startswith("TETHER_") or name in OTHER_VARIABLES:
            continue
        dotted = SHORT_NAMES.get(name)
        if dotted is None and "__" in name:
            dotted = ".".join(part.lower() for part in name.removeprefix("TETHER_").split("__"))
        if dotted is None:
            raise SettingsError(
                f"variable {name} is not known{nearest(name, [*SHORT_NAMES, *OTHER_VARIABLES])}"
            )
        if text:
            found.append((dotted, text, name))
    return found


def parse(text: str, dotted: str, kind: type) -> Any:
    """The value that `text` gives the setting `dotted` of the dataclass `kind`: TOML, or the text itself
    where that is what is wanted."""
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text
    return text if _wants_text(dotted, kind) and not isinstance(value, str) else value


def _wants_text(dotted: str, kind: Any) -> bool:
    for part in dotted.split("."):
        kind = (
            {f.name: f.type for f in dataclasses.fields(kind)}.get(part)
            if dataclasses.is_dataclass(kind)
            else None
        )
    return kind is str


def assign(values: dict[str, Any], dotted: str, value: Any, source: str) -> None:
    """Put a value where `dotted` says, making the tables on the way. `source` is named in the SettingsError
    if one of them is a value."""
    *parents, last = dotted.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise SettingsError(f"{source}: {parent} is not a section")
    values[last] = value


def refuse_unknown(values: Mapping[str, Any], kind: Any, prefix: str) -> None:
    """Compare the keys of a table, and of the tables in it, with the fields of the dataclass `kind`.

    Raises:
        SettingsError: naming the first unknown key after `prefix`, and its nearest neighbour.
    """
    known = {f.name: f.type for f in dataclasses.fields(kind)}
    for key, value in values.items():
        if key not in known:
            raise SettingsError(f"setting {prefix}{key} is not known{nearest(key, list(known))}")
        inner = next(
            (each for each in (known[key], *get_args(known[key])) if dataclasses.is_dataclass(each)), None
        )
        tables = (
            {f"{key}.{i}": item for i, item in enumerate(value)}
            if isinstance(value, list | tuple)
            else {key: value}
        )
        for name, table in tables.items():
            if inner is not None and isinstance(table, dict):
                refuse_unknown(table, inner, f"{prefix}{name}.")


def nearest(name: str, known: Sequence[str]) -> str:
    """What to append to "NAME is not known"."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"
