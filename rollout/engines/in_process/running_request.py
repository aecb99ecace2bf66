"""A running request as the decoding thread sees it, and what decodes such rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rollout.engines.base import Request
from rollout.engines.sampling import sample


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One running request."""

    request: Request
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv: Any = None
    """For the decoder's use; None before its first step."""

    @property
    def ids(self) -> list[int]:
        """Prompt and completion."""
        return [*self.request.prompt, *self.tokens]

    @property
    def finish_reason(self) -> str:
        """ "stop", "length", or "" while it runs."""
        if self.tokens and self.tokens[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.request.sampling.max_tokens else ""

    def take(self, logits: torch.Tensor, version: int) -> None:
        """Sample the next token from `logits` [V] of the weights `version`."""
        token, logprob = sample(logits, self.request.sampling, self.generator)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)


class Decoder(Protocol):
    """Steps rows forward. Not thread-safe: one thread calls it, and weights change only between two steps."""

    def step(self, rows: Sequence[RunningRequest], version: int) -> None:
        """Sample one token for every row under the live weights, which are `version`. A row that does not
        come again has ended."""

    def forget(self, rows: Sequence[RunningRequest]) -> None:
        """Drop the KV of rows; their next step computes it again."""
