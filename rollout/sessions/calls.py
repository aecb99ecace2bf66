"""Keeps the answered calls of a session as a tree: each continues the tokens of another, or has no parent."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from rollout.engines.base import Completion

TextEnd = tuple[int, int]
"""Length and hash of a text: a call does not keep its prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """One answered call.

    Its context is the tokens of `parent` and what it continues, then `inserted`.
    """

    parent: "ModelCall | None"
    """The call whose tokens it continues; None: it continues none."""
    inserted: tuple[int, ...]
    """Tokens of the messages that the harness added, with the beginning of the answer's turn."""
    completion: Completion
    """The answer, as it was sampled."""
    end: int | TextEnd
    """Beginning of a request that continues this call: the key after the answer, or the end of the text of a
    completion, prompt and answer."""
    also: int | None = None
    """Another such key: behind the answer without its thoughts, which most clients leave out."""
    number: int = -1
    """Its number in the sample's record; -1: it is not recorded."""
    trained: bool = True
    """Whether its tokens may be trained; otherwise they are context."""
    as_asked: bool = False
    """Whether it was generated with sampling parameters of its request, and so is context."""

    def path(self) -> Sequence["ModelCall"]:
        """Return the calls whose tokens it continues, from the first to itself."""
        found = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]

    def tokens(self) -> tuple[int, ...]:
        """Return all tokens up to the end of the answer."""
        return tuple(itertools.chain.from_iterable(_pieces(self)))


def text_end(text: str) -> TextEnd:
    """Return the lookup key of a completion with this text, prompt and answer."""
    return len(text), xxhash.xxh3_128_intdigest(_bytes(text))


def context_tokens(parent: ModelCall | None, inserted: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that a call continues: the tokens of `parent`, and the inserted ones."""
    if parent is None:
        return inserted
    return tuple(itertools.chain(*_pieces(parent), inserted))


@dataclass(slots=True)
class CallTree:
    """The calls of a session in the order of their answers.

    A thread may look for the call that a request continues while the event loop adds others.
    """

    calls: list[ModelCall] = field(default_factory=list)
    _by_end: dict[int | TextEnd, list[ModelCall]] = field(default_factory=lambda: defaultdict(list))
    _next: dict[int, list[ModelCall]] = field(default_factory=lambda: defaultdict(list))
    """`id` of a call, or of None -> the calls that continue it."""

    def add(self, call: ModelCall) -> None:
        """Add a call that was answered; its parent was added before."""
        self.calls.append(call)
        for end in _ends(call):
            self._by_end[end].append(call)
        self._next[id(call.parent)].append(call)

    def withdraw(self, call: ModelCall) -> bool:
        """Remove a call that no other call continues; return whether it was removed."""
        if call not in self.calls or any(other.parent is call for other in self.calls):
            return False
        self.calls.remove(call)
        self._next[id(call.parent)].remove(call)
        for end in _ends(call):
            self._by_end[end].remove(call)
            if not self._by_end[end]:
                del self._by_end[end]
        return True

    def continued(self, keys: Sequence[int]) -> tuple[ModelCall | None, int]:
        """Find the call that a request continues: the longest one, of equal ones the last.

        Args:
            keys: the request's keys, see `Dialogue`.

        Returns:
            The call, or None; and how many messages of the request it has.
        """
        for count in range(len(keys) - 1, 0, -1):
            if found := self._by_end.get(keys[count]):
                return found[-1], count
        return None, 0

    def continued_text(self, prompt: str) -> tuple[ModelCall | None, str]:
        """Find the completion that a text prompt continues, and return it with the rest of the prompt."""
        best, rest = None, prompt
        hashed, at = xxhash.xxh3_128(), 0
        for length in sorted({end[0] for end in list(self._by_end) if isinstance(end, tuple)}):
            if length > len(prompt):
                break
            hashed.update(_bytes(prompt[at:length]))
            at = length
            if found := self._by_end.get((length, hashed.intdigest())):
                best, rest = found[-1], prompt[length:]
        return best, rest

    def continued_tokens(self, tokens: tuple[int, ...]) -> tuple[ModelCall | None, int]:
        """Find the call that a request of tokens continues: the longest one, of equal ones the last.

        Returns:
            The call, or None; and how many tokens of the request it has.
        """
        best: tuple[ModelCall | None, int] = None, 0
        reached: list[tuple[ModelCall | None, int]] = [best]
        while reached:
            parent, start = reached.pop()
            for call in reversed(self._next.get(id(parent), ())):
                middle = start + len(call.inserted)
                end = middle + len(call.completion.tokens)
                if end > len(tokens):
                    continue
                if (tokens[start:middle], tokens[middle:end]) == (call.inserted, call.completion.tokens):
                    reached.append((call, end))
                    best = (call, end) if end > best[1] else best
        return best

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


def _pieces(call: ModelCall) -> list[tuple[int, ...]]:
    """Return the pieces of a call's tokens, in order."""
    return [piece for each in call.path() for piece in (each.inserted, each.completion.tokens)]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _ends(call: ModelCall) -> Sequence[int | TextEnd]:
    return (call.end,) if call.also is None else (call.end, call.also)
