"""Drafts a request's next tokens by n-gram lookup in earlier prompts and answers of the run.

Samples of a group share a prompt, prompts recur in later epochs, and an agent's prompt repeats its own
history. A draft is the continuation of the last occurrence of the request's latest tokens: in an answer to
the same prompt, in the prompt, or in the request itself. The engine verifies every draft under the live
weights, so a wrong draft costs time but does not change the distribution.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

MATCHED = 3
"""Length of the n-gram that must match."""
LONGEST_MATCH = 32
"""Maximum match length when extended backwards. A draft is at most as long as its match."""
FOLLOWED_BY = 8
"""Number of tokens that must follow a position before it is indexed while its answer grows."""
KEPT_TOKENS = 1 << 22
"""Maximum stored tokens of prompts and answers; each takes about 200 bytes."""
CHECKED_EVERY = 64
"""Requests between two counts of the stored tokens."""

Gram = tuple[int, ...]


@dataclass(slots=True)
class AnsweredPrompt:
    """Prompt with its answers."""

    key: tuple[int, ...]
    """Token ids of the prompt."""
    rows: list[list[int]]
    """The prompt, then each answer, preceded by the end of the prompt."""
    places: dict[Gram, tuple[int, int]] = field(default_factory=dict)
    """N-gram -> (row of its last occurrence, index of the token after it)."""
    size: int = 0
    """Number of tokens in all rows."""

    def index(self, row: int, start: int, stop: int) -> None:
        """Index the n-grams of a row that end after token `start`, up to token `stop`."""
        tokens, places = self.rows[row], self.places
        for end in range(max(start + 1, MATCHED), stop + 1):
            places[tuple(tokens[end - MATCHED : end])] = (row, end)

    def follow(self, tokens: Sequence[int], max_tokens: int) -> list[int]:
        """Return up to `max_tokens` tokens that followed the last occurrence of the row's latest tokens."""
        place = self.places.get(tuple(tokens[-MATCHED:]))
        if place is None:
            return []
        row, end = self.rows[place[0]], place[1]
        length = MATCHED
        limit = min(LONGEST_MATCH, max_tokens, end, len(tokens))
        while length < limit and row[end - length - 1] == tokens[-length - 1]:
            length += 1
        return row[end : end + min(length, max_tokens)]


class DraftedRequest:
    """Request with a growing answer."""

    __slots__ = ("_indexed", "_prompt", "_row", "_start", "_tokens")

    def __init__(self, prompt: AnsweredPrompt) -> None:
        """Start an answer to a prompt."""
        self._prompt, self._row = prompt, len(prompt.rows)
        self._tokens = list(prompt.key[-LONGEST_MATCH:])  # a match may start in the prompt
        self._start = self._indexed = len(self._tokens)
        prompt.rows.append(self._tokens)

    def __len__(self) -> int:
        """Return the length of the answer, tokens."""
        return len(self._tokens) - self._start

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the answer."""
        self._tokens += tokens
        self._prompt.size += len(tokens)
        self._index(len(self._tokens) - FOLLOWED_BY)

    def draft(self, max_tokens: int) -> list[int]:
        """Return up to `max_tokens` draft tokens; empty without a match."""
        return self._prompt.follow(self._tokens, max_tokens)

    def end(self) -> None:
        """Index the rest of the answer."""
        self._index(len(self._tokens))

    def _index(self, stop: int) -> None:
        if stop > self._indexed:
            self._prompt.index(self._row, self._indexed, stop)
            self._indexed = stop


class DraftHistory:
    """Least-recently-used store of an engine's prompts and answers."""

    def __init__(self, kept_tokens: int = KEPT_TOKENS) -> None:
        """Create an empty history that stores about `kept_tokens` tokens."""
        self._kept_tokens, self._begun = kept_tokens, 0
        self._prompts: OrderedDict[tuple[int, ...], AnsweredPrompt] = OrderedDict()

    def begin(self, prompt: Sequence[int]) -> DraftedRequest:
        """Start an answer to a non-empty prompt."""
        key = tuple(prompt)
        answered = self._prompts.get(key)
        if answered is None:
            answered = self._prompts[key] = AnsweredPrompt(key, [list(key)], size=len(key))
            answered.index(0, 0, len(key))
        self._prompts.move_to_end(key)
        self._begun += 1
        if self._begun % CHECKED_EVERY == 0:
            self._forget()
        return DraftedRequest(answered)

    def _forget(self) -> None:
        """Evict the least recently used prompts; running answers keep a reference to theirs."""
        kept = sum(prompt.size for prompt in self._prompts.values())
        while kept > self._kept_tokens:
            kept -= self._prompts.popitem(last=False)[1].size
