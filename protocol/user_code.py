"""Imports the object that a user names as `MODULE:NAME`, checks its results and locates its exceptions."""

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
TETHER_PACKAGES = tuple(PROJECT / name for name in ("protocol", "reward", "rollout", "services", "trainer"))


def import_attribute(path: str, what: str) -> tuple[Any, str]:
    """Import the class or function that `MODULE:NAME` names; return it and its module's file.

    Args:
        path: `MODULE:NAME`.
        what: name of the setting, with which error messages begin.

    Raises:
        SettingsError: the path is malformed, module or name does not exist, the module raises, or the object
            is neither a class nor a function.
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
    """Return the directories on `sys.path`, except those of Python and the environment, as text."""
    searched = (path for path in sys.path if path and "/lib/python" not in path and Path(path).is_dir())
    programs = str(Path(sys.executable).parent)
    return ", ".join(dict.fromkeys(path for path in searched if path != programs))


def check_call(
    what: str,
    item: Callable[..., Any],
    call_description: str,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> None:
    """Check that a user's class or function accepts the arguments and options.

    Args:
        what: beginning of error messages.
        call_description: description of arguments and options, for error messages.
        options: keyword arguments, which the user chose.

    Raises:
        SettingsError: the signature does not accept the arguments.
    """
    try:
        inspect.signature(item).bind(*arguments, **options)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{what}: {error}; it is called with {call_description}") from None


def call(
    what: str,
    item: Callable[..., Any],
    call_description: str,
    arguments: Sequence[Any],
    options: Mapping[str, Any],
) -> Any:
    """Call a user's class or function; arguments as in `check_call`.

    Raises:
        SettingsError: the arguments do not fit, or the call raises; the message names the place.
    """
    check_call(what, item, call_description, arguments, options)
    try:
        return item(*arguments, **options)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise SettingsError(f"{what}: {located(error)}") from None


def accepted_parameters(
    what: str, function: Callable[..., Any], offered: Sequence[str], *, forbidden: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the names in `offered` that a function accepts; the arguments are passed by name.

    Args:
        offered: names of the available arguments.
        forbidden: names that the function must not have, even with a default.

    Raises:
        SettingsError: the function cannot be called with these arguments.
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
        elif name in forbidden or item.default is inspect.Parameter.empty:
            raise SettingsError(f"{what}: there is no parameter {name!r}; {did_you_mean(name, offered)}")
    return tuple(names)


def returned_number(value: Any) -> float:
    """Return a score or reward of user code as a float.

    Raises:
        ValueError: the value is not a finite float, int or bool, of Python or as a scalar of NumPy or torch.
            The text shows the value ("nan", "'1'") or its type.
    """
    value = value.item() if getattr(value, "shape", None) == () else value
    try:
        if isinstance(value, (bool, int, float)) and math.isfinite(value):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(repr(value)[:60] if isinstance(value, (int, float, str)) else type(value).__name__)


def mutable_copy(metadata: Any) -> Any:
    """Return a deep copy of metadata that user code may change."""
    if isinstance(metadata, Mapping):
        return {name: mutable_copy(value) for name, value in metadata.items()}
    return [mutable_copy(value) for value in metadata] if isinstance(metadata, list) else metadata


def located(error: BaseException) -> str:
    """Return `FILE:LINE: TYPE: text` of an exception, with the place from `place_of`.

    A group of exceptions is described by its first exception.
    """
    error = innermost(error)
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    place = place_of(error)
    return f"{place}: {text}" if place else text


def place_of(error: BaseException, file: str = "") -> str:
    """Return `FILE:LINE` of the innermost frame of an exception outside tether's packages.

    Args:
        file: a file of the user; frames in files below its directory are preferred.

    Returns:
        Empty if there is no such frame.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and not any(Path(frame.filename).is_relative_to(folder) for folder in TETHER_PACKAGES)
    ]
    own = [frame for frame in frames if "/lib/python" not in frame.filename]
    if file:
        below = Path(file).parent
        own = [frame for frame in own if Path(frame.filename).is_relative_to(below)] or own
    chosen = (own or frames)[-1:]
    return f"{chosen[0].filename}:{chosen[0].lineno}" if chosen else ""
