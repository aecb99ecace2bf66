"""Defines one sample: its tokens, its branches, and the model calls that produce them."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.messages import UNKNOWN_EXPERT
from rollout.engines.base import Completion

Generate = Callable[[tuple[int, ...], int | None], Awaitable[Completion]]
"""(tokens, max_tokens) -> continuation of at most `max_tokens` tokens; None: as many as `[sampling]` and
`engine.max_model_len` allow. Raises `EpisodeOver` if the episode has no turn or no tokens left."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt token counts, summed over calls."""

    total: int = 0
    cached: int = 0
    """Tokens found in the engine's prefix cache."""

    def plus(self, total: int, cached: int) -> "PromptTokens":
        """Return the sum with the counts of another call."""
        return PromptTokens(self.total + total, self.cached + cached)


NOTHING_READ = PromptTokens()


class EpisodeOver(Exception):
    """Raised by a model call when the episode has no turn or no tokens left; no token was generated.

    The sample is truncated, not failed: an `Episode` ends with its turns so far.
    """


@dataclass(frozen=True, slots=True)
class Branch:
    """Additional row of a sample: T tokens after a prefix shared with an earlier row."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    """`tokens` to `spans`: as in `Sample`."""
    parent: int
    """Index, within the sample, of the row that provides the first `shared` tokens; -1: no parent."""
    shared: int
    """Length of the shared prefix including the prompt, tokens."""
    calls: tuple[tuple[int, int, int], ...] = ()
    """Rows (number, first, end): token range of the row that holds the answer of a recorded call."""
    turns: tuple[tuple[int, int, int], ...] = ()
    """Rows (place, first, end): token range of a model turn, and the turn's position in the sample's
    chronological order. Empty: the row is one turn."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample without its prompt: T tokens, sampled by the model or inserted by the environment."""

    tokens: tuple[int, ...]
    """[T]."""
    logprobs: tuple[float, ...]
    """[T], nats: behaviour log-probabilities; 0 for inserted tokens."""
    loss_mask: tuple[int, ...]
    """[T]: 1 for tokens sampled by the model, 0 for tokens inserted by the environment."""
    spans: tuple[tuple[int, int], ...]
    """Rows (end, version) covering all T tokens; the last end is T. An inserted token has the version of the
    sampled token before it."""
    finish_reason: str
    """"stop", "length", or "environment" if the environment ended the sample."""
    reward: float | None = None
    """Reward from the environment, if any."""
    experts: NDArray[np.uint16] | None = None
    """[P + T, L, K] routed experts, prompt first, as in `Completion`; None: not recorded."""
    prompt: tuple[int, ...] | None = None
    """[P] prompt of this sample; None: the `prompt_tokens` passed to `run`."""
    branches: tuple[Branch, ...] = ()
    """Additional rows of the sample; `tokens` is row 0."""
    response: str | None = None
    """Text for verifiers; None: the detokenized `tokens`."""
    calls: tuple[tuple[int, int, int], ...] = ()
    """As in `Branch`."""
    recorded: tuple[int, tuple[int, ...]] | None = None
    """(index of the sample in the call record, numbers of recorded calls that appear in no row); None: no
    call was recorded."""
    turns: tuple[tuple[int, int, int], ...] = ()
    """As in `Branch`."""

    def is_trained(self) -> bool:
        """Return whether any row has a sampled token that may be trained."""
        return any(self.loss_mask) or any(any(branch.loss_mask) for branch in self.branches)


class SampleBuilder:
    """Builder of a sample, turn by turn."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._loss_mask: list[int] = []
        self._spans: list[tuple[int, int]] = []
        self._experts: list[NDArray[np.uint16]] = []
        self._turns: list[tuple[int, int, int]] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens so far."""
        return tuple(self._tokens)

    def sampled(self, completion: Completion, *, trained: bool = True) -> None:
        """Append a completion of the model; with `trained` False it is context without gradient."""
        start, count = len(self._tokens), len(completion.tokens)
        self._tokens += completion.tokens
        self._logprobs += completion.logprobs if trained else [0.0] * count
        self._loss_mask += [int(trained)] * count
        self._turns.append((len(self._turns), start, len(self._tokens)))
        for end, version in completion.spans:
            self._extend(start + end, version)
        if completion.experts is not None:
            # Keep the experts of a token's first forward pass, which an earlier turn recorded.
            known = sum(map(len, self._experts))
            self._experts.append(completion.experts[known:])

    def inserted(self, tokens: tuple[int, ...]) -> None:
        """Append tokens of the environment. At least one sampled token must precede them."""
        self._tokens += tokens
        self._logprobs += [0.0] * len(tokens)
        self._loss_mask += [0] * len(tokens)
        self._extend(len(self._tokens), self._spans[-1][1])

    def finish(self, reason: str, reward: float | None = None) -> Sample:
        """Return the sample."""
        experts = None
        if self._experts:
            # The last token was never an input.
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
