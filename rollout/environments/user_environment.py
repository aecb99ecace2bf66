"""Makes environments of the user, `MODULE:CLASS` or `MODULE:FUNCTION`.

    async def play(episode, *, turns: int = 3) -> float | None        a function
    class Game:                                                       or a class
        def __init__(self, *, turns: int = 3): ...
        async def play(self, episode) -> float | None: ...

`[environment] options` are the keyword arguments. A class may also be an `Environment`, which has tokens
instead of text. docs/environments.md describes both.
"""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from protocol.errors import SettingsError
from protocol.user_code import import_attribute, located
from rollout.environments.base import Environment
from rollout.environments.episode import EpisodeEnvironment

WHAT = "setting environment.name"


def load_environment(path: str, options: Mapping[str, Any]) -> Environment:
    """Return the environment at `path`, made with `options`.

    Raises:
        SettingsError: module, class or function is missing, the module or the class raises, it is not
            asynchronous, or the options do not fit; names the file.
    """
    found, file = import_attribute(path, WHAT)
    what = f"{WHAT}: {path} in {file}"
    if isinstance(found, type):
        _check_options(what, found, (), options)
        try:
            made = found(**options)
        except (Exception, SystemExit) as error:  # a class may raise anything
            raise SettingsError(f"{what}: {located(error)}") from None
        if isinstance(made, Environment):
            return made
        play = getattr(made, "play", None)
        if play is None:
            raise SettingsError(f"{what} has no `async def play(self, episode)`")
        _check_options(what, play, (None,), {})
    else:
        _check_options(what, found, (None,), options)
        play = functools.partial(found, **options)
    if not inspect.iscoroutinefunction(play):
        raise SettingsError(f"{what} is not asynchronous; write `async def`")
    return EpisodeEnvironment(play)


def _check_options(what: str, function: Any, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Raise SettingsError if a class or function cannot be called with these arguments."""
    if not callable(function):
        raise SettingsError(f"{what} is neither a class nor a function")
    try:
        inspect.signature(function).bind(*given, **options)
    except TypeError as error:
        takes = "one argument, the episode, and " if given else ""
        raise SettingsError(f"{what}: {error}; it is called with {takes}environment.options") from None
