"""Passes a user's reward function the arguments in its signature.

`protocol/user_code.py` imports the function.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import SettingsError
from protocol.user_code import accepted_parameters, import_attribute, mutable_copy
from reward.group import ResponseGroup

EACH = ("prompt", "response", "metadata", "token_count", "finish_reason")
"""Parameters of a function that scores one response."""
WHOLE = ("prompt", "responses", "metadata", "token_counts", "finish_reasons")
"""Parameters of a function that scores all responses of a prompt."""
TURNS = ("turns", "contexts")
"""Additional parameters of a function that scores turns; `turns` is required for scoring turns."""


@dataclass(frozen=True, slots=True)
class UserCode:
    """User function and the names of its arguments."""

    path: str
    """`MODULE:FUNCTION`."""
    file: str
    function: Callable[..., Any]
    names: Sequence[str]
    """Names of the function's arguments."""

    @property
    def whole(self) -> bool:
        """Whether the function scores all responses of a prompt at once."""
        return "responses" in self.names

    @property
    def by_turn(self) -> bool:
        """Whether the function scores each turn of a sample."""
        return TURNS[0] in self.names

    @property
    def awaits(self) -> bool:
        """Whether the function is asynchronous."""
        called = getattr(self.function, "__call__", None)  # noqa: B004 (an object with an async __call__)
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(called)

    def arguments(self, group: ResponseGroup, i: int) -> dict[str, Any]:
        """Return the arguments for sample `i`, or for all samples if `whole`.

        The function may change them.
        """
        offered: dict[str, Any] = {"prompt": group.prompt}
        if "metadata" in self.names:
            offered["metadata"] = mutable_copy(group.metadata)
        if self.whole:
            offered |= {
                "responses": list(group.responses),
                "token_counts": list(group.token_counts),
                "finish_reasons": list(group.finish_reasons),
                "turns": [list(turns) for turns in group.turns],
                "contexts": [list(contexts) for contexts in group.contexts],
            }
        else:
            offered |= {
                "response": group.responses[i],
                "token_count": group.token_counts[i],
                "finish_reason": group.finish_reasons[i],
            }
            if self.by_turn:
                offered |= {"turns": list(group.turns[i]), "contexts": list(group.contexts[i])}
        return {name: offered[name] for name in self.names}


def load_user_code(path: str, what: str, *, may_score_turns: bool = False) -> UserCode:
    """Import a function and check its parameters.

    Args:
        path: `MODULE:FUNCTION`.
        what: prefix of errors, such as "verifier function".
        may_score_turns: whether the function may have turn parameters.

    Raises:
        SettingsError: the module or function is missing, the module raises, or the parameters do not fit. The
            message names the file.
    """
    function, file = import_attribute(path, what)
    names = _checked_parameters(f"{what}: {path} in {file}", function, TURNS if may_score_turns else ())
    return UserCode(path, file, function, names)


def _checked_parameters(
    what: str, function: Callable[..., Any], turn_names: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names of the arguments to pass. `turn_names` are the allowed turn parameters.

    Raises:
        SettingsError: the function cannot be called with the available arguments.
    """
    parameters = inspect.signature(function).parameters
    whole, by_turn = "responses" in parameters, bool({*turn_names[:1]} & parameters.keys())
    if whole == ("response" in parameters) and (whole or not by_turn):
        turns_hint = ", or `turns` (scores each turn of one)" if turn_names else ""
        raise SettingsError(
            f"{what} must take a parameter `response` (scores one) or `responses` (scores all of a prompt)"
            f"{turns_hint}"
        )
    known = (WHOLE if whole else EACH) + (turn_names if by_turn else ())
    return accepted_parameters(what, function, known, forbidden=EACH if whole else WHOLE)
