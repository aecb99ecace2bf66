"""Makes environments by name."""

import importlib

from protocol.choices import checked_name, checked_options
from rollout.environments.base import Environment, EnvironmentConfig

ENVIRONMENTS = ("guess_number", "single_turn")
"""Modules in `rollout/environments/`, each with a dataclass `Options` and a callable `make` that takes it."""


def make_environment(config: EnvironmentConfig) -> Environment:
    """Return the environment that `config.name` names.

    Raises:
        SettingsError: the name or an option is unknown; suggests the nearest one.
    """
    name = checked_name(config.name, ENVIRONMENTS, "setting environment.name: environment")
    module = importlib.import_module(f"rollout.environments.{name}")
    environment: Environment = module.make(
        checked_options(module.Options, config.options, f"environment {name}")
    )
    return environment
