"""Resolves the source that a user names to a model or a run."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from protocol.errors import SettingsError
from protocol.host.hub import is_hub_name
from services.serving.exports import newest_export
from services.settings.load import FILE, compose_settings, is_given, run_settings
from services.settings.sections import Settings
from services.settings.sources import to_toml


@dataclass(frozen=True, slots=True)
class Serving:
    """Model to serve, and the key of its clients."""

    settings: Settings
    """Sections model, engine, render, sampling, environment; for a followed run also weights and lora."""
    name: str
    """Name of the model for clients."""
    follows: bool = False
    """Whether new versions of the settings' run are served when published."""
    key_file: str = ""
    """File with the API key of clients; empty: clients on this machine need no key."""
    length_is_given: bool = True
    """Whether engine.max_model_len is set; otherwise the model's positions limit its default."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Name -> PEFT directory of the adapters that requests may use as their model."""


def serving_of(source: str, overrides: list[str], follow: bool) -> Serving:
    """Return what `tether serve` serves.

    Args:
        source: run directory, settings file, model directory or name on the hub.
        overrides: as for `compose_settings`.
        follow: whether to serve new versions of the run.

    Raises:
        SettingsError: the source has no model, or is not a run that could be followed.
    """
    path = Path(source)
    given: tuple[str | None, list[str]]
    if (path / FILE).is_file():
        # the address of the run's own endpoint does not apply to this server
        run_overrides = ["environment.host=127.0.0.1", "environment.advertise=", *overrides]
        settings = run_settings(path, run_overrides)
        if follow:
            return Serving(settings, settings.run.name, follows=True)
        export = newest_export(path)
        model = replace(settings.model, path=str(export.absolute()), revision="")
        return Serving(replace(settings, model=model), settings.run.name)
    if follow:
        raise SettingsError(f"--follow: no run in {source}: there is no {FILE}")
    if path.is_file():
        given = source, overrides
    elif not (path / "config.json").is_file() and not is_hub_name(source):
        raise SettingsError(
            f"{source} is not a run, a settings file or a Hugging Face model: it has neither {FILE} nor "
            "config.json; give one of them, or the name of a model on the hub"
        )
    else:
        given = None, [f"model.path={to_toml(source)}", *overrides]
    settings = compose_settings(*given)
    return Serving(
        settings,
        Path(settings.model.path or settings.run.name).name,
        length_is_given=is_given("engine.max_model_len", *given),
    )


def with_adapters(serving: Serving, options: Iterable[str]) -> Serving:
    """Add the adapters in the options `NAME=DIR`; return the new `Serving`.

    Raises:
        SettingsError: an option has another form, a name is in use, or the run is followed.
    """
    adapters: dict[str, Path] = {}
    for option in options:
        name, _, directory = option.partition("=")
        if not name or not directory:
            raise SettingsError(f"--adapter {option}: give NAME=DIR, with a directory in PEFT's format")
        if name in (serving.name, *adapters):
            raise SettingsError(f"--adapter {option}: there is a model {name!r} already; choose another name")
        adapters[name] = Path(directory)
    if adapters and serving.follows:
        raise SettingsError("--adapter: adapters are of one model, and --follow changes it; leave one out")
    return replace(serving, adapters=adapters)
