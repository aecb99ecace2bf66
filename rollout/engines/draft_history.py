"""Drafts a request's next tokens from what was generated before: n-gram lookup in the history of a run.

Samples of a group answer the same prompt, prompts come again in later epochs, and an agent's prompt repeats
its own history. A draft is what followed the request's latest tokens where they last occurred: in an answer
to the same prompt, in the prompt, or in the request itself. The engine verifies every draft under the live
weights, so a wrong one costs time and changes no distribution.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

MATCHED = 3
"""Tokens that have to occur again."""
LONGEST_MATCH = 32
"""Tokens to which a match is followed backwards. A draft is as long as its match, at most."""
FOLLOWED_BY = 8
"""Tokens that follow a place before it is indexed, while its answer grows."""
KEPT_TOKENS = 1 << 22
"""Tokens of prompts and answers that are kept; each takes about 200 bytes."""
CHECKED_EVERY = 64
"""Requests between two counts of the kept tokens."""

Gram = tuple[int, ...]


@dataclass(slots=True)
class AnsweredPrompt:
    """A prompt, and the answers to it."""

    key: tuple[int, ...]
    """The prompt."""
    rows: list[list[int]]
    """The prompt, then each answer behind the end of the prompt."""
    places: dict[Gram, tuple[int, int]] = field(default_factory=dict)
    """`MATCHED` tokens -> the row in which they occurred last, and the index of the token behind them."""
    size: int = 0
    """Tokens of all rows."""

    def index(self, row: int, start: int, stop: int) -> None:
        """Index the grams of a row that end behind token `start`, up to token `stop`."""
        tokens, places = self.rows[row], self.places
        for end in range(max(start + 1, MATCHED), stop + 1):
            places[tuple(tokens[end - MATCHED : end])] = (row, end)

    def follow(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that followed the last tokens of a row where they occurred last."""
        place = self.places.get(tuple(tokens[-MATCHED:]))
        if place is None:
            return []
        row, end = self.rows[place[0]], place[1]
        length = MATCHED
        limit = min(LONGEST_MATCH, most, end, len(tokens))
        while length < limit and row[end - length - 1] == tokens[-length - 1]:
            length += 1
        return row[end : end + min(length, most)]


class DraftedRequest:
    """A request whose answer grows."""

    __slots__ = ("_indexed", "_prompt", "_row", "_start", "_tokens")

    def __init__(self, prompt: AnsweredPrompt) -> None:
        """Begin an answer to a prompt."""
        self._prompt, self._row = prompt, len(prompt.rows)
        self._tokens = list(prompt.key[-LONGEST_MATCH:])  # a match may begin in the prompt
        self._start = self._indexed = len(self._tokens)
        prompt.rows.append(self._tokens)

    def __len__(self) -> int:
        """Return the number of tokens of the answer."""
        return len(self._tokens) - self._start

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the answer."""
        self._tokens += tokens
        self._prompt.size += len(tokens)
        self._index(len(self._tokens) - FOLLOWED_BY)

    def draft(self, most: int) -> list[int]:
        """Return at most `most` tokens that may come next; none without a match."""
        return self._prompt.follow(self._tokens, most)

    def end(self) -> None:
        """Index the rest of the answer."""
        self._index(len(self._tokens))

    def _index(self, stop: int) -> None:
        if stop > self._indexed:
            self._prompt.index(self._row, self._indexed, stop)
            self._indexed = stop


class DraftHistory:
    """Prompts and answers of one engine, the ones used last."""

    def __init__(self, kept_tokens: int = KEPT_TOKENS) -> None:
        """Begin without history; it keeps about `kept_tokens` tokens."""
        self._kept_tokens, self._begun = kept_tokens, 0
        self._prompts: OrderedDict[tuple[int, ...], AnsweredPrompt] = OrderedDict()

    def begin(self, prompt: Sequence[int]) -> DraftedRequest:
        """Begin an answer to a prompt of at least one token."""
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
        """Forget the prompts that were not used for longest; running answers to them keep them."""
        kept = sum(prompt.size for prompt in self._prompts.values())
        while kept > self._kept_tokens:
            kept -= self._prompts.popitem(last=False)[1].size
