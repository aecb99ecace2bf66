"""Finds the object that a user names as `MODULE:NAME`, and checks its number or locates its exception."""

import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protocol.choices import did_you_mean
from protocol.errors import SettingsError, innermost

PROJECT = Path(__file__).resolve().parents[1]
OURS = tuple(PROJECT / name for name in ("protocol", "reward", "rollout", "services", "trainer"))


def import_attribute(path: str, what: str) -> tuple[Any, str]:
    """Import the class or function that `MODULE:NAME` names; return it and its module's file.

    Args:
        path: as the user wrote it.
        what: the setting, with which an error begins.

    Raises:
        SettingsError: the path has another form, module or name are missing, the module raises, or it is
            neither a class nor a function.
    """
    name, colon, attribute = path.partition(":")
    if not (name and colon and attribute):
        raise SettingsError(f"{what}: {path!r} is not MODULE:NAME, such as my_module:name")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise SettingsError(f"{what}: {located(error)}") from None
        raise SettingsError(
            f"{what}: there is no {name.replace('.', '/')}.py in {_users_directories() or 'any directory'}; "
            "name its directory in run.modules or PYTHONPATH"
        ) from None
    except (Exception, SystemExit) as error:  # a module may raise anything, or be a script that exits
        raise SettingsError(f"{what}: {located(error)}") from None
    file = str(getattr(module, "__file__", None) or name)
    item: Any = module
    for part in attribute.split("."):
        if not hasattr(item, part):
            callables = [key for key, value in vars(item).items() if callable(value)]
            hint = did_you_mean(part, callables) if callables else "it defines nothing that can be called"
            raise SettingsError(f"{what}: {file} has no {part!r}; {hint}")
        item = getattr(item, part)
    if not callable(item):
        raise SettingsError(f"{what}: {path} in {file} is neither a class nor a function")
    return item, file


def _users_directories() -> str:
    """Name the directories that are searched for modules, but for those of Python and the environment."""
    searched = (path for path in sys.path if path and "/lib/python" not in path and Path(path).is_dir())
    programs = str(Path(sys.executable).parent)
    return ", ".join(dict.fromkeys(path for path in searched if path != programs))


def check_call(
    what: str, item: Callable[..., Any], given: str, arguments: Sequence[Any], options: Mapping[str, Any]
) -> None:
    """Check that a class or function of the user can be called with arguments and options.

    Args:
        what: the beginning of errors.
        item: the class or function.
        given: describes arguments and options, for errors.
        arguments: positional ones.
        options: keyword arguments, which the user chose.

    Raises:
        SettingsError: it takes others.
    """
    try:
        inspect.signature(item).bind(*arguments, **options)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{what}: {error}; it is called with {given}") from None


def call(
    what: str, item: Callable[..., Any], given: str, arguments: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Call a class or function of the user; arguments as in `check_call`.

    Raises:
        SettingsError: it takes others, or raises; names the place.
    """
    check_call(what, item, given, arguments, options)
    try:
        return item(*arguments, **options)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise SettingsError(f"{what}: {located(error)}") from None


def taken_names(
    what: str, function: Callable[..., Any], offered: Sequence[str], *, never: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return which of the arguments `offered` a function takes; they are passed by name.

    Args:
        what: the beginning of errors.
        function: the user's.
        offered: arguments that there are.
        never: names that it may not have, even with a default.

    Raises:
        SettingsError: it cannot be called with these arguments.
    """
    parameters = inspect.signature(function).parameters
    if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values()):
        return tuple(offered)
    names = []
    for name, item in parameters.items():
        if item.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        if item.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise SettingsError(
                f"{what}: parameter {name!r} is positional-only; arguments are passed by name"
            )
        if name in offered:
            names.append(name)
        elif name in never or item.default is inspect.Parameter.empty:
            raise SettingsError(f"{what}: there is no parameter {name!r}; {did_you_mean(name, offered)}")
    return tuple(names)


def returned_number(value: Any) -> float:
    """Return the score or reward of the user's code as a float.

    Raises:
        ValueError: it is not a finite float, int or bool, of Python or as a scalar of NumPy or torch; the
            text shows it: "nan", "'1'", or its type.
    """
    value = value.item() if getattr(value, "shape", None) == () else value
    try:
        if isinstance(value, (bool, int, float)) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(repr(value)[:60] if isinstance(value, (int, float, str)) else type(value).__name__)


def own_copy(metadata: Any) -> Any:
    """Return a copy of metadata, or of a value in it, that code of the user may change."""
    if isinstance(metadata, Mapping):
        return {name: own_copy(value) for name, value in metadata.items()}
    return [own_copy(value) for value in metadata] if isinstance(metadata, list) else metadata


def located(error: BaseException) -> str:
    """Return `FILE:LINE: TYPE: text` of an exception, with the place of `place_of`.

    For a group of exceptions, describe the first one.
    """
    error = innermost(error)
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    place = place_of(error)
    return f"{place}: {text}" if place else text


def place_of(error: BaseException, file: str = "") -> str:
    """Return `FILE:LINE` of the innermost place outside our packages that an exception passed.

    Args:
        error: the exception.
        file: a file of the user; places below its directory are preferred.

    Returns:
        Empty if there is no such place.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and not any(Path(frame.filename).is_relative_to(folder) for folder in OURS)
    ]
    own = [frame for frame in frames if "/lib/python" not in frame.filename]
    if file:
        below = Path(file).parent
        own = [frame for frame in own if Path(frame.filename).is_relative_to(below)] or own
    chosen = (own or frames)[-1:]
    return f"{chosen[0].filename}:{chosen[0].lineno}" if chosen else ""
