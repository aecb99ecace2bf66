"""Defines one sample: its tokens, its branches, and the calls of the model that make it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.messages import UNKNOWN_EXPERT
from rollout.engines.base import Completion

Generate = Callable[[tuple[int, ...], int | None], Awaitable[Completion]]
"""(tokens, max_tokens) -> their continuation by at most that many tokens; None: as many as `[sampling]` and
`engine.max_model_len` allow. Raises `EpisodeOver` if the episode has no turn or no room left."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Tokens of the prompts of some calls."""

    total: int = 0
    cached: int = 0
    """Those that the engine had in its prefix cache."""

    def plus(self, total: int, cached: int) -> "PromptTokens":
        """Return the sum with another call."""
        return PromptTokens(self.total + total, self.cached + cached)


NOTHING_READ = PromptTokens()


class EpisodeOver(Exception):
    """Raised by a model call for which the episode has no turn or no room left; nothing was generated.

    The sample is truncated, which is no failure: an `Episode` ends with what it has.
    """


@dataclass(frozen=True, slots=True)
class Branch:
    """One row of a sample with several, T tokens behind those that it shares with an earlier row."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """All as in `Sample`."""
    parent: int
    """Index of the row, within the sample, with whose first `shared` tokens it begins; -1: none."""
    shared: int
    """Tokens, the prompt's included."""
    calls: tuple[tuple[int, int, int], ...] = ()
    """Rows (number, first, end): tokens of the row that are the answer of a recorded call."""
    turns: tuple[tuple[int, int, int], ...] = ()
    """Rows (place, first, end): tokens of the row that are a turn of the model, and its place in the order in
    which the sample's turns were made. Empty: the row is one turn."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample without its prompt: T tokens, sampled by the model or inserted by the environment."""

    tokens: tuple[int, ...]
    """[T]."""
    logprobs: tuple[float, ...]
    """[T] nats, behaviour log-probabilities; 0 where the environment inserted the token."""
    loss_mask: tuple[int, ...]
    """[T]: 1 where the model sampled the token, 0 where the environment inserted it."""
    spans: tuple[tuple[int, int], ...]
    """Rows (end, version) over all T tokens, the last end being T. An inserted token has the version of the
    sampled token before it."""
    finish_reason: str
    """"stop", "length", or "environment" if the environment ended it."""
    reward: float | None = None
    """Reward of the environment, if it gives one."""
    experts: NDArray[np.uint16] | None = None
    """[P + T, L, K], the prompt's first, as in `Completion`; None: nothing was recorded."""
    prompt: tuple[int, ...] | None = None
    """[P]: what its tokens continue; None: the prompt's tokens, as they were given to `run`."""
    branches: tuple[Branch, ...] = ()
    """More rows of the sample, of which the tokens above are row 0."""
    response: str | None = None
    """Text for verifiers; None: that of the tokens."""
    calls: tuple[tuple[int, int, int], ...] = ()
    """As in `Branch`."""
    recorded: tuple[int, tuple[int, ...]] | None = None
    """Index of the sample in the record of its calls, and the numbers of recorded calls that are in no row;
    None: nothing was recorded."""
    turns: tuple[tuple[int, int, int], ...] = ()
    """As in `Branch`."""

    def is_trained(self) -> bool:
        """Return whether a token of any row was sampled and may be trained."""
        return any(self.loss_mask) or any(any(branch.loss_mask) for branch in self.branches)


class SampleBuilder:
    """Builds a sample turn by turn."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._loss_mask: list[int] = []
        self._spans: list[tuple[int, int]] = []
        self._experts: list[NDArray[np.uint16]] = []
        self._turns: list[tuple[int, int, int]] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens so far."""
        return tuple(self._tokens)

    def sampled(self, completion: Completion, *, trained: bool = True) -> None:
        """Append a completion of the model; one that may not be trained is context."""
        start, count = len(self._tokens), len(completion.tokens)
        self._tokens += completion.tokens
        self._logprobs += completion.logprobs if trained else [0.0] * count
        self._loss_mask += [int(trained)] * count
        self._turns.append((len(self._turns), start, len(self._tokens)))
        for end, version in completion.spans:
            self._extend(start + end, version)
        if completion.experts is not None:
            # A token's first pass counts: that of an earlier turn.
            known = sum(map(len, self._experts))
            self._experts.append(completion.experts[known:])

    def inserted(self, tokens: tuple[int, ...]) -> None:
        """Append tokens of the environment; the model must have sampled some before."""
        self._tokens += tokens
        self._logprobs += [0.0] * len(tokens)
        self._loss_mask += [0] * len(tokens)
        self._extend(len(self._tokens), self._spans[-1][1])

    def finish(self, reason: str, reward: float | None = None) -> Sample:
        """Return the sample."""
        experts = None
        if self._experts:
            # The last token has been no input.
            experts = np.pad(
                np.concatenate(self._experts), ((0, 1), (0, 0), (0, 0)), constant_values=UNKNOWN_EXPERT
            )
        return Sample(
            self.tokens,
            tuple(self._logprobs),
            tuple(self._loss_mask),
            tuple(self._spans),
            reason,
            reward,
            experts,
            turns=tuple(self._turns),
        )

    def _extend(self, end: int, version: int) -> None:
        if self._spans and self._spans[-1][1] == version:
            self._spans.pop()
        self._spans.append((end, version))
