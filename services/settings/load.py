"""Loads the settings of a process: defaults < TOML or JSON file < `TETHER_*` variables < `--set a.b=c`."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import SettingsError
from protocol.host.atomic_file import write_atomically
from protocol.paths import absolute
from protocol.validation import validated
from services.settings.automatic import Machine, choose_automatic, split_automatic, this_machine
from services.settings.checks import check_settings
from services.settings.paths import resolve_paths
from services.settings.resume_rules import ResumeRule, rule_of
from services.settings.sections import Settings
from services.settings.sources import ABSENT, assign, from_environ, parse, read_file, to_toml
from trainer.storage.checksums import MEMBER, sealed

FILE = "settings.json"
"""File in the run directory with the settings of the run's last start."""
SPOOL = "spool.sqlite"
"""Name of a file that exists in every run directory."""
PRIVATE = ("ledger", "bus", "monitor")
"""Sections that `public_settings` omits: addresses, and names of files with secrets."""


def load_settings(
    path: str | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    machine: Machine | None = None,
) -> Settings:
    """Compose and validate the settings of a process; arguments and errors as in `compose_settings`."""
    settings = compose_settings(path, overrides, environ, machine)
    check_settings(settings)
    return settings


def compose_settings(
    path: str | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    machine: Machine | None = None,
) -> Settings:
    """Compose the settings of a process; each setting is validated by itself, but not against others.

    Args:
        path: TOML or JSON file; by default the value of `TETHER_CONFIG`, if set.
        overrides: `section.key=value` strings. Values are TOML, or plain strings if the text is not TOML or
            the setting is a string.
        environ: environment variables; by default those of the process.
        machine: hardware for automatic settings; by default this machine.

    Raises:
        SettingsError: a setting is invalid; the message has the setting, the cause and the most similar known
            name.
    """
    environ = os.environ if environ is None else environ
    values = _given(path, overrides, environ)
    automatic = split_automatic(values)
    settings, automatic = _with_fixed_choices(_typed(values), automatic)
    return choose_automatic(settings, automatic, machine or this_machine(environ))


def is_given(setting: str, path: str | None = None, overrides: Sequence[str] = ()) -> bool:
    """Return whether a `section.key` is set, also to its default; arguments as in `compose_settings`.

    Raises:
        SettingsError: as `compose_settings`.
    """
    section, name = setting.split(".")
    table = _given(path, overrides, os.environ).get(section)
    return isinstance(table, dict) and name in table


def _given(path: str | None, overrides: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the tables of the settings that file, variables and overrides name."""
    path = path or environ.get("TETHER_CONFIG") or None
    values: dict[str, Any] = read_file(Path(path)) if path else {}
    if path:
        values = resolve_paths(values, absolute(Path(path).parent, Path.cwd()))
    moved = _moved_run(Path(path), values) if path else ""
    for dotted, text, source in from_environ(environ):
        _assign(values, dotted, parse(text, dotted, Settings), source)
        moved = "" if dotted == "run.dir" else moved
    for override in overrides:
        dotted, separator, text = override.partition("=")
        if not separator or not dotted.strip():
            raise SettingsError(f"--set {override!r}: write section.key=value")
        if dotted.strip() == "ledger.url" and "@" in text:
            raise SettingsError(
                "--set ledger.url: every user can read a command line; "
                "set TETHER_REDIS_URL, or ledger.password_file"
            )
        _assign(values, dotted.strip(), parse(text.strip(), dotted.strip(), Settings), f"--set {dotted}")
        moved = "" if dotted.strip() == "run.dir" else moved
    if moved:
        raise SettingsError(moved)
    return values


def _moved_run(path: Path, values: Mapping[str, Any]) -> str:
    """Return why it is ambiguous which run a moved run's file continues; empty if it is not."""
    table, here = values.get("run"), absolute(path.parent, Path.cwd()).resolve()
    recorded = table.get("dir") if isinstance(table, dict) else None
    if path.name != FILE or not isinstance(recorded, str) or not (here / SPOOL).exists():
        return ""
    try:
        if Path(recorded).resolve() == here:
            return ""
    except (OSError, ValueError):  # not a path: the validation of settings reports it
        return ""
    return (
        f"{path} has run.dir = {recorded!r}, and this run was moved or copied to {here}: say which one is "
        f"meant by --run-dir {here} or --run-dir {recorded}"
    )


def _with_fixed_choices(settings: Settings, automatic: list[str]) -> tuple[Settings, list[str]]:
    """Keep the choices of an earlier start that no resume may change, also on another machine.

    Returns:
        The settings with these choices, and the names that remain to be chosen.
    """
    fixed = [
        dotted for dotted in automatic if rule_of(dotted)[0] is ResumeRule.FIXED or dotted == "trainer.dtype"
    ]
    old = recorded_settings(settings.run_dir) if fixed else None
    if old is None:
        return settings, automatic
    for dotted in fixed:
        section, name = dotted.split(".")
        kept = replace(getattr(settings, section), **{name: getattr(getattr(old, section), name)})
        settings = replace(settings, **{section: kept})
    return settings, [dotted for dotted in automatic if dotted not in fixed]


def _typed(values: Mapping[str, Any]) -> Settings:
    """Convert tables to settings; validates names, types and ranges. `[ledger]` may contain a password."""
    return validated(Settings, values, secret="ledger", absent=ABSENT)


def _assign(values: dict[str, Any], dotted: str, value: Any, source: str) -> None:
    """Set a key as `assign` does; paths in the value are relative to the working directory."""
    tables: dict[str, Any] = {}
    assign(tables, dotted, value, source)
    resolved: Any = resolve_paths(tables, Path.cwd())
    for part in dotted.split("."):
        resolved = resolved[part]
    assign(values, dotted, resolved, source)


def run_settings(run_dir: Path, overrides: Sequence[str] = (), name: str = FILE) -> Settings:
    """Return the settings of a run's last start, or of another settings file in its directory.

    Reads no environment variable except the ledger's URL.

    Raises:
        SettingsError: there is no run in the directory.
    """
    path = run_dir / name
    if not path.is_file():
        raise SettingsError(
            f"no run in {run_dir}: there is no settings.json; give the directory of a run, such as runs/demo"
        )
    environ = {name: value for name, value in os.environ.items() if name == "TETHER_REDIS_URL"}
    return load_settings(str(path), [*overrides, f"run.dir={to_toml(run_dir.absolute())}"], environ)


def recorded_settings(run_dir: Path) -> Settings | None:
    """Return the settings of a run's last start as written; None for a new run.

    The settings are not validated against each other, since rules may have changed since the last start.

    Raises:
        SettingsError: the file cannot be read.
    """
    path = run_dir / FILE
    if not path.is_file():
        return None
    try:
        return _typed(read_file(path))
    except SettingsError as error:
        raise SettingsError(f"{path}, the settings of the last start: {error}") from None


def dump_settings(settings: Settings, path: Path) -> None:
    """Write the effective settings as JSON with a checksum, for the processes of the run.

    The ledger's URL is omitted, because it may contain a password.

    Raises:
        OSError: the file cannot be written.
    """
    values = msgspec.to_builtins(settings)
    values["ledger"]["url"] = ""
    values["run"]["dir"] = str(settings.run_dir)
    write_atomically(path, sealed(json.dumps(values, indent=2).encode()))


def public_settings(run_dir: Path) -> dict[str, Any]:
    """Return the public settings of a run as tables; empty if they cannot be read.

    The sections in `PRIVATE` (addresses, names of files with secrets) and the checksum are omitted.
    """
    try:
        values = json.loads((run_dir / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return {section: table for section, table in values.items() if section not in {*PRIVATE, MEMBER}}
