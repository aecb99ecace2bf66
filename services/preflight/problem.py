"""Defines the problems that prevent a run from starting, and converts them to errors."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from protocol.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Problem:
    """Reason why a run cannot start."""

    cause: str
    """Cause of the problem."""
    remedy: str = ""
    """Suggested action; empty if `cause` contains it."""
    setting: str = ""
    """Dotted name of the setting; empty if `cause` contains it."""
    value: object = None
    """Value of that setting."""

    def __str__(self) -> str:
        name = f"setting {self.setting} = {self.value!r}: " if self.setting else ""
        return f"{name}{self.cause}{f'; {self.remedy}' if self.remedy else ''}"


def refuse(problems: Iterable[Problem]) -> None:
    """Raise SettingsError if there is a problem; the message has the first and the number of others."""
    found = list(problems)
    if found:
        more = f" ({len(found) - 1} more: `tether check` lists all)" if len(found) > 1 else ""
        raise SettingsError(f"{found[0]}{more}")


def refusals(check: Callable[..., object], *arguments: object) -> Iterator[Problem]:
    """Call a check with the arguments; yield its SettingsError as a problem."""
    try:
        check(*arguments)
    except SettingsError as error:
        yield Problem(str(error))
