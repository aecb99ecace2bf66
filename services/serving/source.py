"""Turns the source that a user names into the model or the run that is served."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from protocol.errors import SettingsError
from protocol.host.hub import is_hub_name
from services.serving.exports import newest_export
from services.settings.load import FILE, compose_settings, run_settings
from services.settings.sections import Settings
from services.settings.sources import to_toml


@dataclass(frozen=True, slots=True)
class Serving:
    """Model that is served, and the key of its clients."""

    settings: Settings
    """Sections model, engine, render, sampling, environment; of a run that is followed, weights and lora."""
    name: str
    """Name of the model that clients see."""
    follows: bool = False
    """Whether the versions of the settings' run are served as they come."""
    key_file: str = ""
    """File with the API key of clients; empty: clients on this machine need none."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Name -> PEFT directory of the adapters that requests may name as their model."""


def serving_of(source: str, overrides: list[str], follow: bool) -> Serving:
    """Return what to serve.

    Args:
        source: a run directory, a settings file, a model directory or a name on the hub.
        overrides: as for `compose_settings`.
        follow: whether to serve the versions of the run.

    Raises:
        SettingsError: the source has no model, or is no run that could be followed.
    """
    path = Path(source)
    if (path / FILE).is_file():
        # the port of the run's own endpoint, and who reaches it, are not the server's
        own = ["environment.host=127.0.0.1", "environment.advertise=", *overrides]
        settings = run_settings(path, own)
        if follow:
            return Serving(settings, settings.run.name, follows=True)
        export = newest_export(path)
        model = replace(settings.model, path=str(export.absolute()), revision="")
        return Serving(replace(settings, model=model), settings.run.name)
    if follow:
        raise SettingsError(f"--follow: no run in {source}: there is no {FILE}")
    if path.is_file():
        settings = compose_settings(source, overrides)
    elif not (path / "config.json").is_file() and not is_hub_name(source):
        raise SettingsError(
            f"{source} is no run, no settings file and no Hugging Face model: it has neither {FILE} nor "
            "config.json; give one of them, or the name of a model on the hub"
        )
    else:
        settings = compose_settings(None, [f"model.path={to_toml(source)}", *overrides])
    return Serving(settings, Path(settings.model.path or settings.run.name).name)


def with_adapters(serving: Serving, given: Iterable[str]) -> Serving:
    """Return `serving` with the adapters of the options `NAME=DIR`.

    Raises:
        SettingsError: an option is not of that form, a name is taken, or the run is followed.
    """
    adapters: dict[str, Path] = {}
    for option in given:
        name, _, directory = option.partition("=")
        if not name or not directory:
            raise SettingsError(f"--adapter {option}: give NAME=DIR, with a directory in PEFT's format")
        if name in (serving.name, *adapters):
            raise SettingsError(f"--adapter {option}: there is a model {name!r} already; choose another name")
        adapters[name] = Path(directory)
    if adapters and serving.follows:
        raise SettingsError("--adapter: adapters are of one model, and --follow changes it; leave one out")
    return replace(serving, adapters=adapters)
