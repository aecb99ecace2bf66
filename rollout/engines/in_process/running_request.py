"""Defines a running request of the decoding thread, and the interface of decoders."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.engines.base import Request
from rollout.engines.sampling import sample


@dataclass(slots=True, eq=False)
class RunningRequest:
    """Running request: one row of the decode batch."""

    request: Request
    generator: torch.Generator
    """Random generator of the request's samples."""
    tokens: list[int] = field(default_factory=list)
    """[T] tokens generated so far."""
    logprobs: list[float] = field(default_factory=list)
    """[T] log-probabilities as sampled, nats."""
    versions: list[int] = field(default_factory=list)
    """[T] version that each token was sampled under."""
    experts: list[NDArray[np.uint16]] = field(default_factory=list)
    """Arrays [inputs, L, K] that cover the first inputs, as far as experts are recorded."""
    kv: Any = None
    """KV cache, set by the decoder; None before the first step."""

    @property
    def ids(self) -> list[int]:
        """Token ids of prompt and completion."""
        return [*self.request.prompt, *self.tokens]

    @property
    def length(self) -> int:
        """Length of prompt plus completion, tokens."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def finish_reason(self) -> str:
        """ "stop", "length", or "" while it runs."""
        if self.tokens and self.tokens[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.request.sampling.max_tokens else ""

    def record(self, first: int, experts: NDArray[np.uint16]) -> None:
        """Record the experts [inputs, L, K] of inputs from `first` on, unless already recorded."""
        known = sum(map(len, self.experts))
        if first + len(experts) > known:
            self.experts.append(experts[known - first :])


def take_tokens(rows: Sequence[RunningRequest], logits: torch.Tensor, version: int) -> None:
    """Sample the next token of B rows from `logits` [B, V], which the weights of `version` computed."""
    drawn = sample(logits, [row.request.sampling for row in rows], [row.generator for row in rows])
    for row, (token, logprob) in zip(rows, drawn, strict=True):
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.versions.append(version)


def batches(rows: Iterable[RunningRequest], most_tokens: int) -> Iterator[list[RunningRequest]]:
    """Yield batches of rows with similar lengths, each a single row or padded to at most `most_tokens`."""
    batch: list[RunningRequest] = []
    for row in sorted(rows, key=lambda row: row.length):
        if (len(batch) + 1) * row.length > most_tokens and batch:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


class Decoder(Protocol):
    """Decoder of rows. Not thread-safe: one thread calls it, and weights change only between steps."""

    def step(self, rows: Sequence[RunningRequest], version: int) -> None:
        """Sample one token for each row under the live weights.

        If memory is insufficient for all rows, only the first rows get a token; the very first row always
        does.

        Args:
            rows: rows in order of arrival; a row that is missing in the next step has been forgotten.
            version: live version, recorded with each token.
        """

    def forget(self, rows: Sequence[RunningRequest]) -> None:
        """Drop the KV cache of rows: they have ended, or their next step recomputes it."""
