"""Gives a user's reward function the arguments that it names; `protocol/user_code.py` imports it."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.errors import SettingsError
from protocol.user_code import import_attribute, own_copy, taken_names
from reward.group import ResponseGroup

EACH = ("prompt", "response", "metadata", "token_count", "finish_reason")
"""Parameters of a function that is called for one response."""
WHOLE = ("prompt", "responses", "metadata", "token_counts", "finish_reasons")
"""Parameters of a function that is called for all responses of a prompt."""
TURNS = ("turns", "contexts")
"""Parameters of either kind, if it scores turns. It does if it names the first one."""


@dataclass(frozen=True, slots=True)
class UserCode:
    """A function of the user, and the arguments that it takes."""

    path: str
    """`MODULE:FUNCTION`."""
    file: str
    function: Callable[..., Any]
    names: Sequence[str]
    """The arguments that it takes."""

    @property
    def whole(self) -> bool:
        """Whether it takes all responses of a prompt."""
        return "responses" in self.names

    @property
    def by_turn(self) -> bool:
        """Whether it scores each turn of a sample."""
        return TURNS[0] in self.names

    @property
    def awaits(self) -> bool:
        """Whether it is asynchronous."""
        called = getattr(self.function, "__call__", None)  # noqa: B004 (an object with an asynchronous one)
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(called)

    def arguments(self, group: ResponseGroup, i: int) -> dict[str, Any]:
        """Return its arguments for sample `i`; if it takes all responses, for all. It may change them."""
        offered: dict[str, Any] = {"prompt": group.prompt}
        if "metadata" in self.names:
            offered["metadata"] = own_copy(group.metadata)
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
        what: the beginning of errors, such as "verifier function".
        may_score_turns: whether it may take turns.

    Raises:
        SettingsError: module or function is missing, the module raises, or the parameters do not fit; names
            the file.
    """
    function, file = import_attribute(path, what)
    names = _checked_parameters(f"{what}: {path} in {file}", function, TURNS if may_score_turns else ())
    return UserCode(path, file, function, names)


def _checked_parameters(
    what: str, function: Callable[..., Any], turn_names: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names of the arguments to pass. `turn_names` are the ones for turns, if any.

    Raises:
        SettingsError: the function cannot be called with the arguments that there are.
    """
    parameters = inspect.signature(function).parameters
    whole, by_turn = "responses" in parameters, bool({*turn_names[:1]} & parameters.keys())
    if whole == ("response" in parameters) and (whole or not by_turn):
        more = ", or `turns` (scores each turn of one)" if turn_names else ""
        raise SettingsError(
            f"{what} must take a parameter `response` (scores one) or `responses` (scores all of a prompt)"
            f"{more}"
        )
    known = (WHOLE if whole else EACH) + (turn_names if by_turn else ())
    return taken_names(what, function, known, never=EACH if whole else WHOLE)
