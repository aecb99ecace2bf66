"""Scores by a function of the user, `MODULE:FUNCTION`, which is given the parameters that it names.

    def score(*, response: str, metadata: dict) -> float                     one response
    def score(*, responses: list[str], metadata: dict) -> list[float]        all responses of a prompt

Either may be `async def`; the responses of a prompt are then scored at the same time, in one event loop.
docs/rewards.md describes the parameters.
"""

import asyncio
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.choices import did_you_mean
from protocol.errors import RewardError, SettingsError
from reward.group import ResponseGroup
from reward.verifiers.location import locate

EACH = ("prompt", "response", "metadata", "token_count", "finish_reason")
"""Parameters of a function that scores one response."""
WHOLE = ("prompt", "responses", "metadata", "token_counts", "finish_reasons")
"""Parameters of a function that scores all responses of a prompt."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `function`."""

    path: str
    """The function, as `MODULE:FUNCTION`; the module is found in `run.modules` and `PYTHONPATH`."""


def load_function(options: Options, timeout_s: float) -> "UserFunction":
    """Import the function and check its parameters.

    Args:
        options: which function.
        timeout_s: limit for an asynchronous function on one response, or, if it takes all, on one group.

    Raises:
        SettingsError: module or function is missing, the module raises, or the parameters do not fit; names
            the file.
    """
    path = options.path
    name, colon, attribute = path.partition(":")
    if not colon or not name or not attribute:
        raise SettingsError(
            f"verifier function: path {path!r} is not MODULE:FUNCTION, such as my_reward:score"
        )
    module = _import(name)
    file = str(getattr(module, "__file__", None) or name)
    function: Any = module
    for part in attribute.split("."):
        if not hasattr(function, part):
            known = [key for key, value in vars(function).items() if callable(value)]
            hint = did_you_mean(part, known) if known else "it has no function"
            raise SettingsError(f"verifier function: {file} has no {part!r}; {hint}")
        function = getattr(function, part)
    if not callable(function):
        raise SettingsError(f"verifier function: {path} in {file} is not a function")
    names = _checked_parameters(path, file, function)
    return UserFunction(path, file, function, names, timeout_s)


class UserFunction:
    """Verifier that calls a function of the user."""

    maps_device_memory = False

    def __init__(
        self, path: str, file: str, function: Callable[..., Any], names: Sequence[str], timeout_s: float
    ) -> None:
        self.file = file
        self._path, self._function, self._names, self._timeout_s = path, function, names, timeout_s
        self._whole = "responses" in names
        self._awaits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 (an object with an asynchronous __call__)
        )
        self.at_once = self._whole or self._awaits
        self._loop = asyncio.Runner() if self._awaits else None
        """One event loop for all calls, so that the function may keep connections."""

    def load(self) -> None:
        """Do nothing: the function's module is imported."""

    def score(self, group: ResponseGroup, samples: Sequence[int]) -> list[float | None]:
        """Return the scores of these samples; None for one that exceeded the time limit.

        Raises:
            RewardError: the function returned something else than scores.
            Exception: whatever the function raises.
        """
        calls = (
            [self._whole_arguments(group)] if self._whole else [self._arguments(group, i) for i in samples]
        )
        if self._loop is not None:
            results = self._loop.run(self._await_all(calls))
        else:
            results = [self._function(**arguments) for arguments in calls]
        if not self._whole:
            return [None if value is _LATE else self._checked(value) for value in results]
        (values,) = results
        if values is _LATE:
            return [None] * len(samples)
        n = len(group.responses)
        if not isinstance(values, (list, tuple)) or len(values) != n:
            what = f"{len(values)} scores" if isinstance(values, (list, tuple)) else type(values).__name__
            raise RewardError(
                f"{self._path} returned {what} for {n} responses ({self.file}); return a list of {n}"
            )
        return [self._checked(values[i]) for i in samples]

    def close(self) -> None:
        """Close the event loop."""
        if self._loop is not None:
            self._loop.close()

    async def _await_all(self, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Await all calls at the same time; the first exception cancels the others."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(self._await(arguments)) for arguments in calls]
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return [task.result() for task in running]

    async def _await(self, arguments: Mapping[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._function(**arguments)
        except TimeoutError:
            if limit.expired():
                return _LATE
            raise

    def _arguments(self, group: ResponseGroup, i: int) -> dict[str, Any]:
        known = {
            "prompt": group.prompt,
            "response": group.responses[i],
            "metadata": dict(group.metadata),
            "token_count": group.token_counts[i],
            "finish_reason": group.finish_reasons[i],
        }
        return {name: known[name] for name in self._names}

    def _whole_arguments(self, group: ResponseGroup) -> dict[str, Any]:
        known = {
            "prompt": group.prompt,
            "responses": list(group.responses),
            "metadata": dict(group.metadata),
            "token_counts": list(group.token_counts),
            "finish_reasons": list(group.finish_reasons),
        }
        return {name: known[name] for name in self._names}

    def _checked(self, value: Any) -> float:
        """Return a score as float. Raises RewardError if it is not a finite float, int or bool."""
        try:
            if isinstance(value, (bool, int, float)) and math.isfinite(value):
                return float(value)
        except OverflowError:
            pass
        shown = repr(value)[:60] if isinstance(value, (int, float, str)) else type(value).__name__
        raise RewardError(
            f"{self._path} returned {shown} ({self.file}); a score is a finite float, int or bool"
        )


_LATE = object()
"""Result of a call that exceeded the time limit."""


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise SettingsError(f"verifier function: {locate(error)}: {error}") from None
        searched = ", ".join(dict.fromkeys(path for path in sys.path if path and "/lib/python" not in path))
        raise SettingsError(
            f"verifier function: there is no {name.replace('.', '/')}.py in {searched}; "
            "name its directory in run.modules or PYTHONPATH"
        ) from None
    except Exception as error:  # a module may raise anything
        raise SettingsError(f"verifier function: {locate(error)}: {type(error).__name__}: {error}") from None


def _checked_parameters(path: str, file: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments to pass.

    Raises:
        SettingsError: the function cannot be called with the arguments that there are.
    """
    what = f"verifier function: {path} in {file}"
    parameters = inspect.signature(function).parameters
    whole = "responses" in parameters
    if whole == ("response" in parameters):
        raise SettingsError(
            f"{what} must take a parameter `response` (scores one) or `responses` (scores all of a prompt)"
        )
    known, other = (WHOLE, EACH) if whole else (EACH, WHOLE)
    if any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values()):
        return known
    names = []
    for name, item in parameters.items():
        if item.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        if item.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise SettingsError(
                f"{what}: parameter {name!r} is positional-only; arguments are passed by name"
            )
        if name in known:
            names.append(name)
        elif name in other or item.default is inspect.Parameter.empty:
            raise SettingsError(f"{what}: there is no parameter {name!r}; {did_you_mean(name, known)}")
    return tuple(names)
