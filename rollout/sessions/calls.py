"""Keeps the answered calls of a session as a tree, in which each call continues its parent's tokens."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import xxhash

from rollout.engines.base import Completion

TextEnd = tuple[int, int]
"""Length and hash of a text; stored instead of the text itself."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """One answered call.

    Its context is all tokens of `parent`, followed by `inserted`.
    """

    parent: "ModelCall | None"
    """Call whose tokens this call continues, if any."""
    inserted: tuple[int, ...]
    """Tokens of the messages that the harness added, including the start of the answer's turn."""
    completion: Completion
    """The sampled answer."""
    end: int | TextEnd
    """Lookup key of requests that continue this call: the dialogue key after the answer, or the end of the
    completion's text (prompt plus answer)."""
    also: int | None = None
    """Lookup key after the answer without its thoughts, which most clients omit."""
    number: int = -1
    """Call number in the sample's record; -1: not recorded."""
    trained: bool = True
    """Whether the answer's tokens may be trained; otherwise they are context."""
    has_own_sampling: bool = False
    """Whether the request's own sampling parameters were applied, which makes the answer context."""

    def path(self) -> Sequence["ModelCall"]:
        """Return the chain of calls from the root to this call."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]

    def tokens(self) -> tuple[int, ...]:
        """Return all tokens up to the end of the answer."""
        return tuple(itertools.chain.from_iterable(_pieces(self)))


def text_end(text: str) -> TextEnd:
    """Return the lookup key of a completion with this text (prompt plus answer)."""
    return len(text), xxhash.xxh3_128_intdigest(_bytes(text))


def context_tokens(parent: ModelCall | None, inserted: tuple[int, ...]) -> tuple[int, ...]:
    """Return the context of a call: all tokens of `parent`, followed by `inserted`."""
    if parent is None:
        return inserted
    return tuple(itertools.chain(*_pieces(parent), inserted))


@dataclass(slots=True)
class CallTree:
    """Calls of a session, in the order of their answers.

    A thread may search the tree while the event loop adds calls.
    """

    calls: list[ModelCall] = field(default_factory=list)
    _by_end: dict[int | TextEnd, list[ModelCall]] = field(default_factory=lambda: defaultdict(list))
    _next: dict[int, list[ModelCall]] = field(default_factory=lambda: defaultdict(list))
    """`id` of a call, or of None -> calls that continue it."""

    def add(self, call: ModelCall) -> None:
        """Add an answered call. Its parent must be in the tree."""
        self.calls.append(call)
        for end in _ends(call):
            self._by_end[end].append(call)
        self._next[id(call.parent)].append(call)

    def withdraw(self, call: ModelCall) -> bool:
        """Remove a call that no other call continues; return whether the call was removed."""
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
        """Find the longest call that a request continues; of equally long calls, the last.

        Args:
            keys: keys of the request, see `Dialogue`.

        Returns:
            The call or None, and the number of the request's messages that it covers.
        """
        for count in range(len(keys) - 1, 0, -1):
            if found := self._by_end.get(keys[count]):
                return found[-1], count
        return None, 0

    def continued_text(self, prompt: str) -> tuple[ModelCall | None, str]:
        """Return the completion that a text prompt continues, and the rest of the prompt."""
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
        """Find the longest call that a token prompt continues; of equally long calls, the last.

        Returns:
            The call or None, and the number of the prompt's tokens that it covers.
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
        """Yield the rows of the tree, ordered by their first calls.

        Each call is in one row. The first call that continues the end of a row extends the row; later ones
        start new rows.
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
    """Return a call's tokens in pieces, in order."""
    return [piece for each in call.path() for piece in (each.inserted, each.completion.tokens)]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _ends(call: ModelCall) -> Sequence[int | TextEnd]:
    return (call.end,) if call.also is None else (call.end, call.also)
