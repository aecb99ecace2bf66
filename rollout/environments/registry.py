"""Creates environments: built-in ones by name, users' by `MODULE:CLASS` or `MODULE:FUNCTION`.

    async def play(episode, *, turns: int = 3) -> float | None        a function
    class Game:                                                       or a class
        def __init__(self, *, turns: int = 3): ...
        async def play(self, episode) -> float | None: ...

`[environment] options` are passed as keyword arguments. A class may also subclass `Environment`, which works
on tokens instead of text. docs/environments.md describes both.
"""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protocol.choices import Entry, Registry, load
from protocol.errors import SettingsError
from protocol.user_code import call, check_call, import_attribute
from protocol.validation import validated
from rollout.config import EnvironmentConfig
from rollout.environments.base import Environment
from rollout.environments.episode import EpisodeEnvironment
from rollout.sandboxes.registry import PROCESS

SETTING = "setting environment.name"
EPISODE = "one argument, the episode, and environment.options"


@dataclass(frozen=True, slots=True)
class EnvironmentEntry(Entry):
    """Module with a dataclass `Options` and a callable `make` that takes it."""

    has_sessions: bool = False
    """Whether the environment's harness calls a URL; such calls are always recorded."""
    records: bool = False
    """Whether the environment exchanges text and records it by default (`environment.record`)."""
    has_sandbox: bool = False
    """Whether parts of the environment can run in the episode's sandbox."""
    gives_reward: bool = True
    """Whether the environment may compute rewards, so that no verifier is required."""
    is_light: bool = False
    """Whether a sample uses only one engine request at a time and no other resource."""


ENVIRONMENTS = Registry(
    {
        "agent": EnvironmentEntry("rollout.environments.agent", has_sessions=True),
        "command": EnvironmentEntry("rollout.environments.command", has_sessions=True, has_sandbox=True),
        "given": EnvironmentEntry("rollout.environments.given", gives_reward=False, is_light=True),
        "gsm8k": EnvironmentEntry("rollout.environments.gsm8k", is_light=True),
        "guess_number": EnvironmentEntry("rollout.environments.guess_number", is_light=True),
        "harbor": EnvironmentEntry(
            "rollout.environments.third_party.harbor", has_sessions=True, has_sandbox=True
        ),
        "openenv": EnvironmentEntry("rollout.environments.third_party.openenv"),
        "server": EnvironmentEntry("rollout.environments.server", has_sessions=True),
        "single_turn": EnvironmentEntry(
            "rollout.environments.single_turn", gives_reward=False, is_light=True
        ),
        "textarena": EnvironmentEntry("rollout.environments.third_party.textarena"),
        "tools": EnvironmentEntry(
            "rollout.environments.tools", records=True, has_sandbox=True, gives_reward=False
        ),
        "verifiers": EnvironmentEntry("rollout.environments.third_party.verifiers", has_sessions=True),
    }
)
ON_DATA = "given"
"""Environment whose samples come from the data."""


def evaluated(config: EnvironmentConfig) -> EnvironmentConfig:
    """Return the environment for evaluation: `single_turn` instead of completions from the data."""
    return EnvironmentConfig("single_turn") if config.name == ON_DATA else config


def records_calls(config: EnvironmentConfig) -> bool:
    """Return whether an environment's model calls are recorded."""
    entry = ENVIRONMENTS.get(config.name, EnvironmentEntry(""))
    return config.record == "on" or entry.has_sessions or (entry.records and config.record == "auto")


def is_light(config: EnvironmentConfig) -> bool:
    """Return whether samples use no connection, sandbox, process or record; False for user code."""
    entry = ENVIRONMENTS.get(config.name, EnvironmentEntry(""))
    return entry.is_light and not records_calls(config)


def make_environment(config: EnvironmentConfig) -> Environment:
    """Return the environment of `config.name`; a name with a colon refers to user code.

    Raises:
        SettingsError: the name or an option is unknown (the message suggests a similar one), the user's
            module is invalid, or recording is required but not supported.
    """
    entry = ENVIRONMENTS.get(config.name, EnvironmentEntry(""))
    if config.sandbox.name != PROCESS and not entry.has_sandbox:
        raise SettingsError(
            f"setting environment.sandbox.name: {config.sandbox.name!r}, but environment {config.name!r} "
            f"runs no commands; ones that do are {', '.join(ENVIRONMENTS.having('has_sandbox'))}"
        )
    environment = _make_from_config(config)
    environment.apply_config(config)
    if isinstance(environment, EpisodeEnvironment):
        environment.has_calls = records_calls(config)
    elif config.record != "auto":
        always = (
            " always records its calls" if environment.has_calls else " has no episodes of text to record"
        )
        raise SettingsError(
            f"setting environment.record: {config.record!r}, but environment {config.name!r}{always}; "
            "remove the setting"
        )
    return environment


def _make_from_config(config: EnvironmentConfig) -> Environment:
    if ":" in config.name:
        return load_environment(config.name, config.options)
    module = load(ENVIRONMENTS.find(config.name, f"{SETTING}: environment").path)
    environment: Environment = module.make(
        validated(module.Options, config.options, f"environment {config.name}: option ")
    )
    return environment


def load_environment(path: str, options: Mapping[str, Any]) -> Environment:
    """Import the environment at `path` and create it with `options`.

    Raises:
        SettingsError: module, class or function is missing, raises, is not asynchronous, or rejects the
            options; the message names the file.
    """
    item, file = import_attribute(path, SETTING)
    what = f"{SETTING}: {path} in {file}"
    if isinstance(item, type):
        environment = call(what, item, "environment.options", (), options)
        if isinstance(environment, Environment):
            return environment
        play = getattr(environment, "play", None)
        if play is None:
            raise SettingsError(f"{what} has no `async def play(self, episode)`")
        check_call(what, play, EPISODE, (None,), {})
    else:
        check_call(what, item, EPISODE, (None,), options)
        play = functools.partial(item, **options)
    if not inspect.iscoroutinefunction(play):
        raise SettingsError(f"{what} is not asynchronous; write `async def`")
    return EpisodeEnvironment(play)
