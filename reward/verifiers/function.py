"""Scores with a user's function, `MODULE:FUNCTION`, which receives the arguments in its signature.

    def score(*, response: str, metadata: dict) -> float                     one response
    def score(*, responses: list[str], metadata: dict) -> list[float]        all responses of a prompt
    def score(*, turns: list[str], metadata: dict) -> list[float]            each turn of a sample

Each may be `async def`. Responses of all prompts are then scored concurrently, in one event loop.
docs/rewards.md describes the parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import RewardError
from protocol.user_code import returned_number
from reward.function_arguments import UserCode, load_user_code
from reward.group import ResponseGroup, Verdict
from reward.verifiers.base import AwaitedVerifier, LoadedVerifier, Notes

MAX_CONCURRENT_CALLS = 10_000
"""Limit of concurrent calls of an asynchronous function. In practice, the number of held groups is the
limit."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `function`."""

    path: str
    """Function as `MODULE:FUNCTION`; the module is imported from `run.modules` and `PYTHONPATH`."""


def load_function(options: Options) -> "UserFunction | AsyncUserFunction":
    """Import the function and check its parameters.

    Raises:
        SettingsError: the module or function is missing, the module raises, or the parameters do not fit. The
            message names the file.
    """
    code = load_user_code(options.path, "verifier function", may_score_turns=True)
    return AsyncUserFunction(code) if code.awaits else UserFunction(code)


class UserFunction(LoadedVerifier):
    """Verifier that calls a user's function."""

    def __init__(self, code: UserCode) -> None:
        self.file, self.at_once, self.by_turn, self._code = code.file, code.whole, code.by_turn, code

    def score(self, group: ResponseGroup, samples: Sequence[int]) -> list[Verdict]:
        """Return the scores of `samples`.

        Raises:
            RewardError: the function did not return scores.
            Exception: any exception of the function.
        """
        function, arguments = self._code.function, self._code.arguments
        if self._code.whole:
            return checked_scores(self._code, function(**arguments(group, 0)), group, samples)
        return [checked_verdict(self._code, function(**arguments(group, i)), group, i) for i in samples]


class AsyncUserFunction(AwaitedVerifier):
    """Verifier that awaits a user's function."""

    max_running = MAX_CONCURRENT_CALLS

    def __init__(self, code: UserCode) -> None:
        self.file, self.at_once, self.by_turn, self._code = code.file, code.whole, code.by_turn, code

    async def answer(self, group: ResponseGroup, samples: Sequence[int], notes: Notes) -> list[Verdict]:
        """Return the scores of `samples`.

        Raises:
            RewardError: the function did not return scores.
            Exception: any exception of the function.
        """
        if self._code.whole:
            values = await self._code.function(**self._code.arguments(group, 0))
            return checked_scores(self._code, values, group, samples)
        return [
            checked_verdict(self._code, await self._code.function(**self._code.arguments(group, i)), group, i)
            for i in samples
        ]


def checked_scores(
    code: UserCode, values: Any, group: ResponseGroup, samples: Sequence[int]
) -> list[Verdict]:
    """Return the scores of `samples` from a function's scores of all samples.

    Raises:
        RewardError: `values` is not a list with one score per response.
    """
    listed = _listed(code, values, len(group.responses), "responses")
    return [checked_verdict(code, listed[i], group, i) for i in samples]


def checked_verdict(code: UserCode, value: Any, group: ResponseGroup, sample: int) -> Verdict:
    """Return a function's score of a sample, or one score per turn.

    Raises:
        RewardError: the value is neither.
    """
    if not code.by_turn:
        return checked_score(code, value)
    count = len(group.turns[sample])
    return [checked_score(code, score) for score in _listed(code, value, count, f"turns of sample {sample}")]


def _listed(code: UserCode, values: Any, count: int, of: str) -> Sequence[Any]:
    """Return a list or tuple of `count` values. Raises RewardError for any other value."""
    if isinstance(values, (list, tuple)) and len(values) == count:
        return values
    what = f"{len(values)} scores" if isinstance(values, (list, tuple)) else type(values).__name__
    raise RewardError(f"{code.path} returned {what} for {count} {of} ({code.file}); return a list of {count}")


def checked_score(code: UserCode, value: Any) -> float:
    """Return a score as float. Raises RewardError if it is not a finite float, int or bool."""
    try:
        return returned_number(value)
    except ValueError as shown:
        raise RewardError(
            f"{code.path} returned {shown} ({code.file}); a score is a finite float, int or bool"
        ) from None
