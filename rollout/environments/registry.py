"""Makes environments by name."""

import importlib

from protocol.choices import checked_name, checked_options
from rollout.environments.base import Environment, EnvironmentConfig
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
ON_DATA = "given"
"""The environment whose samples come with the data."""


def evaluated(config: EnvironmentConfig) -> EnvironmentConfig:
    """Return the environment of an evaluation: where the data answer in training, the model does."""
    return EnvironmentConfig("single_turn") if config.name == ON_DATA else config


def make_environment(config: EnvironmentConfig) -> Environment:
    """Return the environment that `config.name` names; a name with a colon is one of the user.

    Raises:
        SettingsError: the name or an option is unknown (suggests the nearest one), or the user's module does
            not fit.
    """
    if ":" in config.name:
        return load_environment(config.name, config.options)
    name = checked_name(config.name, ENVIRONMENTS, "setting environment.name: environment")
    module = importlib.import_module(f"rollout.environments.{name}")
    environment: Environment = module.make(
        checked_options(module.Options, config.options, f"environment {name}")
    )
    return environment
