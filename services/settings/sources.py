"""Reads settings from a file, `TETHER_*` variables and `section.key=value` strings."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from protocol.choices import did_you_mean
from protocol.errors import SettingsError
from protocol.validation import type_at
from trainer.storage.checksums import MEMBER

SHORT_NAMES = {
    "TETHER_MAX_STALENESS": "bound.max_staleness",
    "TETHER_GROUPS_PER_STEP": "bound.groups_per_step",
    "TETHER_STALENESS_POLICY": "bound.staleness_policy",
    "TETHER_MAX_ATTEMPTS": "bound.max_attempts",
    "TETHER_REDIS_URL": "ledger.url",
    "TETHER_RUN": "run.name",
    "TETHER_RUN_DIR": "run.dir",
    "TETHER_STEPS": "run.steps",
    "TETHER_NODES": "cluster.nodes",
    "TETHER_NODE_RANK": "cluster.node_rank",
    "TETHER_RENDEZVOUS": "cluster.rendezvous",
}
"""Variable -> setting, for frequent settings, in addition to `TETHER_SECTION__KEY`."""
OTHER_VARIABLES = frozenset({"TETHER_CONFIG", "TETHER_LOG_LEVEL", "TETHER_INSTANCE"})
"""Variables that other modules read: settings file, log level, name of the process in its run."""

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

CLOUDS = ("AWS_", "GOOGLE_", "GCS_", "AZURE_")
"""Prefixes of variables with which services access object stores."""

ABSENT = {
    "overlap_param_gather": "the weights of a step are read as a whole right after it, to be digested and "
    "published, so there is no forward pass that could hide their gathering",
    "tp_comm_overlap": "it is a feature of TransformerEngine's linear layers, and the layers here are "
    "Megatron's own",
    "moe_token_dispatcher_type": "tokens go to their experts by one all-to-all of this trainer, without "
    "padding or capacity; there is no allgather and no flex (DeepEP) dispatcher",
    "distributed_backend": "it is nccl on a GPU and gloo on a CPU; set trainer.device",
    "distributed_timeout_minutes": "set trainer.process_group_timeout_s, in seconds",
    "lora_dropout": "set lora.dropout",
    "dropout": "set lora.dropout; the policy itself is trained without",
    "trust_remote_code": "set model.trust_remote_code",
}
"""Setting of another library that does not exist here, in any section -> reason or replacement."""


def read_file(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML or JSON file. Raises SettingsError; the message names the file."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Windows editors write a byte order mark
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        inside = path / "config.toml"  # written by `tether init`
        example = inside if inside.is_file() else "deploy/configs/demo.toml"
        raise SettingsError(
            f"settings file {path}: {error.strerror}; give the path of a TOML file such as {example}"
        ) from None
    except (ValueError, RecursionError) as error:  # also invalid UTF-8, or a number too long to parse
        raise SettingsError(f"settings file {path}: {error}") from None
    if not isinstance(values, dict):
        raise SettingsError(f"settings file {path}: expected tables at the top level")
    values.pop(MEMBER, None)  # only `tether verify --files` compares the checksum: users may edit the file
    return values


def from_environ(environ: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (section.key, text, variable) for every non-empty `TETHER_*` variable of a setting.

    Raises:
        SettingsError: a variable is unknown, or two variables set one setting to different values.
    """
    log_level(environ)
    values: dict[str, tuple[str, str, str]] = {}
    for name, text in sorted(environ.items()):
        if not name.startswith("TETHER_") or name in OTHER_VARIABLES:
            continue
        dotted = SHORT_NAMES.get(name)
        if dotted is None and "__" in name:
            dotted = ".".join(part.lower() for part in name.removeprefix("TETHER_").split("__"))
        if dotted is None:
            known = [*SHORT_NAMES, *OTHER_VARIABLES]
            raise SettingsError(f"variable {name} is not known; {did_you_mean(name, known)}")
        if not text:
            continue
        _, earlier_text, earlier_name = values.setdefault(dotted, (dotted, text, name))
        if earlier_text != text:
            raise SettingsError(
                f"variables {earlier_name} and {name} both set {dotted}, to different values: unset one"
            )
    return list(values.values())


def log_level(environ: Mapping[str, str]) -> str:
    """Return the log level in `TETHER_LOG_LEVEL`, by default INFO. Raises SettingsError if unknown."""
    text = environ.get("TETHER_LOG_LEVEL") or "INFO"
    if text.upper() not in LOG_LEVELS:
        raise SettingsError(
            f"variable TETHER_LOG_LEVEL: {text!r} is not known; use one of {', '.join(LOG_LEVELS)}"
        )
    return text.upper()


def parse(text: str, dotted: str, kind: type) -> Any:
    """Parse `text` as the value of the setting `dotted` of the dataclass `kind`.

    Returns its TOML value, or `text` itself if it is not TOML or the setting is a string.
    """
    try:
        tables = tomllib.loads(f"x = {text}")
    except (ValueError, RecursionError):  # not TOML, or a number or nesting too long to parse
        return text
    if len(tables) > 1:  # the text has a line break followed by another name
        return text
    return text if _is_text(dotted, kind) and not isinstance(tables["x"], str) else tables["x"]


def to_toml(value: Any) -> str:
    """Format a setting's value as TOML. Strings and numbers are written as in JSON, paths as strings.

    TOML does not support JSON's surrogate escapes, and requires an escape for DEL.
    """
    if isinstance(value, Mapping):
        items = ", ".join(f"{to_toml(key)} = {to_toml(item)}" for key, item in value.items())
        return f"{{ {items} }}" if items else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(to_toml(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def assign(values: dict[str, Any], dotted: str, value: Any, source: str) -> None:
    """Set the key `dotted` of nested tables; create missing tables.

    Raises:
        SettingsError: a parent is not a table; the message has `source`.
    """
    *parents, last = dotted.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
        if not isinstance(values, dict):
            raise SettingsError(f"{source}: {parent} is not a section")
    values[last] = value


def _is_text(dotted: str, kind: type) -> bool:
    hint = type_at(dotted.split("."), kind)
    return getattr(hint, "__origin__", hint) in (str, Literal)
