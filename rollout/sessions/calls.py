"""Keeps the answered calls of a session as a tree: each continues the tokens of another, or begins anew."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rollout.engines.base import Completion


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """One answered call.

    Its context is the tokens of `parent` and what it continues, then `inserted`.
    """

    parent: "ModelCall | None"
    """The call whose tokens it continues; None: it begins anew."""
    inserted: tuple[int, ...]
    """Tokens of what the harness added, with the beginning of the answer's turn."""
    completion: Completion
    """The answer, as it was sampled."""
    end: int | str
    """What a request begins with that continues this call: the key behind the answer, or the text of a
    completion, prompt and answer."""
    number: int = -1
    """Its number in the sample's record; -1: it is not recorded."""
    trained: bool = True
    """Whether its tokens may be trained; otherwise they are context."""

    def path(self) -> Sequence["ModelCall"]:
        """Return the calls whose tokens it continues, from the first to itself."""
        found = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]

    def tokens(self) -> tuple[int, ...]:
        """Return all tokens up to the end of the answer."""
        return tuple(token for call in self.path() for token in (*call.inserted, *call.completion.tokens))


def context_tokens(parent: ModelCall | None, inserted: tuple[int, ...]) -> tuple[int, ...]:
    """Return what a call is to continue: the tokens of `parent`, and those that were inserted."""
    return (*(parent.tokens() if parent is not None else ()), *inserted)


@dataclass(slots=True)
class CallTree:
    """The calls of a session in the order of their answers."""

    calls: list[ModelCall] = field(default_factory=list)
    _by_end: dict[int | str, list[ModelCall]] = field(default_factory=lambda: defaultdict(list))

    def add(self, call: ModelCall) -> None:
        """Add a call that was answered; its parent was added before."""
        self.calls.append(call)
        self._by_end[call.end].append(call)

    def withdraw(self, call: ModelCall) -> bool:
        """Remove a call that nobody has continued; returns whether it was removed."""
        if call not in self.calls or any(other.parent is call for other in self.calls):
            return False
        self.calls.remove(call)
        self._by_end[call.end].remove(call)
        if not self._by_end[call.end]:
            del self._by_end[call.end]
        return True

    def continued(self, keys: Sequence[int]) -> tuple[ModelCall | None, int]:
        """Find the call that a request continues: the longest one, of equal ones the last.

        Args:
            keys: those of the request, see `Dialogue`.

        Returns:
            The call, or None; and how many messages of the request it has.
        """
        for count in range(len(keys) - 1, 0, -1):
            if found := self._by_end.get(keys[count]):
                return found[-1], count
        return None, 0

    def continued_text(self, prompt: str) -> tuple[ModelCall | None, str]:
        """Find the completion that a text prompt continues, and return it with the rest of the prompt."""
        ends = [end for end in self._by_end if isinstance(end, str) and prompt.startswith(end)]
        if not ends:
            return None, prompt
        longest = max(ends, key=len)
        return self._by_end[longest][-1], prompt.removeprefix(longest)

    def rows(self) -> Iterator[tuple[ModelCall, ...]]:
        """Yield the calls row by row, each call once: a row continues with the first call that continues it.

        Rows come in the order of their first calls.
        """
        rows: list[list[ModelCall]] = []
        last: dict[int, list[ModelCall]] = {}
        for call in self.calls:
            row = last.pop(id(call.parent), None)
            if row is None:
                row = []
                rows.append(row)
            row.append(call)
            last[id(call)] = row
        return (tuple(row) for row in rows)
