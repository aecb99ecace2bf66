"""Makes environments by name."""

from dataclasses import dataclass

from protocol.choices import Entry, Registry, checked_options, load
from protocol.errors import SettingsError
from rollout.environments.base import Environment, EnvironmentConfig
from rollout.environments.episode import EpisodeEnvironment
from rollout.environments.user_environment import load_environment


@dataclass(frozen=True, slots=True)
class EnvironmentEntry(Entry):
    """Module of an environment with a dataclass `Options` and a callable `make` that takes it."""

    has_sessions: bool = False
    """Whether its harness talks to a URL; its calls are always recorded."""
    records: bool = False
    """Whether it exchanges text and records it, unless `environment.record` is off."""


ENVIRONMENTS = Registry(
    {
        "agent": EnvironmentEntry("rollout.environments.agent", has_sessions=True),
        "command": EnvironmentEntry("rollout.environments.command", has_sessions=True),
        "given": EnvironmentEntry("rollout.environments.given"),
        "gsm8k": EnvironmentEntry("rollout.environments.gsm8k"),
        "guess_number": EnvironmentEntry("rollout.environments.guess_number"),
        "server": EnvironmentEntry("rollout.environments.server", has_sessions=True),
        "single_turn": EnvironmentEntry("rollout.environments.single_turn"),
        "textarena": EnvironmentEntry("rollout.environments.textarena"),
        "tools": EnvironmentEntry("rollout.environments.tools", records=True),
        "verifiers": EnvironmentEntry("rollout.environments.verifiers", has_sessions=True),
    }
)
ON_DATA = "given"
"""The environment whose samples come with the data."""


def evaluated(config: EnvironmentConfig) -> EnvironmentConfig:
    """Return the environment of an evaluation: where the data answer in training, the model does."""
    return EnvironmentConfig("single_turn") if config.name == ON_DATA else config


def records_calls(config: EnvironmentConfig) -> bool:
    """Return whether calls of an environment are recorded."""
    entry = ENVIRONMENTS.get(config.name, EnvironmentEntry(""))
    return config.record == "on" or entry.has_sessions or (entry.records and config.record == "auto")


def make_environment(config: EnvironmentConfig) -> Environment:
    """Return the environment that `config.name` names; a name with a colon is one of the user.

    Raises:
        SettingsError: the name or an option is unknown (suggests the nearest one), the user's module does
            not fit, or it cannot record what it is to record.
    """
    environment = _made(config)
    if isinstance(environment, EpisodeEnvironment):
        environment.has_calls = records_calls(config)
    elif config.record != "auto":
        always = (
            " always records its calls" if environment.has_calls else " has no episodes of text to record"
        )
        raise SettingsError(
            f"setting environment.record: {config.record!r}, but environment {config.name!r}{always}; "
            "leave it out"
        )
    return environment


def _made(config: EnvironmentConfig) -> Environment:
    if ":" in config.name:
        return load_environment(config.name, config.options)
    module = load(ENVIRONMENTS.find(config.name, "setting environment.name: environment").path)
    environment: Environment = module.make(
        checked_options(module.Options, config.options, f"environment {config.name}")
    )
    return environment
