"""Makes environments by name."""

import importlib

from protocol.choices import checked_name, checked_options
from protocol.errors import SettingsError
from rollout.environments.base import Environment, EnvironmentConfig
from rollout.environments.episode import EpisodeEnvironment
from rollout.environments.user_environment import load_environment

ENVIRONMENTS = (
    "agent",
    "command",
    "given",
    "gsm8k",
    "guess_number",
    "server",
    "single_turn",
    "textarena",
    "tools",
    "verifiers",
)
"""Modules in `rollout/environments/`, each with a dataclass `Options` and a callable `make` that takes it."""
OF_SESSIONS = ("agent", "command", "server", "verifiers")
"""Those whose harness talks to a URL."""
RECORD = ("auto", "on", "off")
"""What `environment.record` may be."""
RECORDS = ("tools",)
"""Environments that exchange text and record it, unless `environment.record` is off."""
ON_DATA = "given"
"""The environment whose samples come with the data."""


def evaluated(config: EnvironmentConfig) -> EnvironmentConfig:
    """Return the environment of an evaluation: where the data answer in training, the model does."""
    return EnvironmentConfig("single_turn") if config.name == ON_DATA else config


def records_calls(config: EnvironmentConfig) -> bool:
    """Return whether calls of an environment are recorded."""
    by_itself = (*OF_SESSIONS, *RECORDS) if config.record == "auto" else OF_SESSIONS
    return config.record == "on" or config.name in by_itself


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
    name = checked_name(config.name, ENVIRONMENTS, "setting environment.name: environment")
    module = importlib.import_module(f"rollout.environments.{name}")
    environment: Environment = module.make(
        checked_options(module.Options, config.options, f"environment {name}")
    )
    return environment
