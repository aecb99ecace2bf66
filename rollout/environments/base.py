"""What an environment is: it turns one prompt into one sample, by as many generations as it likes."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from rollout.engines.base import Completion
from rollout.prompts.base import Prompt
from rollout.render import Renderer

Generate = Callable[[tuple[int, ...], int | None], Awaitable[Completion]]
"""Continue these tokens by at most so many more; None: as many as `[sampling]` allows."""


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """Section `[environment]`: what turns a prompt into a sample."""

    name: str = "single_turn"
    """The environment, a name of `rollout/environments/registry.py`: single_turn or guess_number."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that environment."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What follows the prompt in one sample: T tokens, sampled or inserted."""

    tokens: tuple[int, ...]
    """[T]."""
    logprobs: tuple[float, ...]
    """[T] nats, as sampled; 0 where the environment inserted the token."""
    loss_mask: tuple[int, ...]
    """[T]: 1 where the model sampled the token, 0 where the environment inserted it."""
    spans: tuple[tuple[int, int], ...]
    """Rows (end, version) over all T tokens; an inserted token has the version of the sampled token before
    it. The last end is T."""
    finish_reason: str
    """"stop", "length", or "environment" where the environment ended it."""
    reward: float | None = None
    """If the environment itself gives one."""


class Environment(ABC):
    """Plays one sample. One instance serves all samples of a process at once, so state lives in `run`."""

    @abstractmethod
    async def run(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> Sample:
        """Play one sample. Cancelling it cancels the generation in progress; nothing else is left behind.

        Raises:
            SettingsError: if the prompt lacks what this environment needs.
            EngineError: from `generate`.
        """


class SampleBuilder:
    """Collects a sample turn by turn."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._loss_mask: list[int] = []
        self._spans: list[tuple[int, int]] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far."""
        return tuple(self._tokens)

    def sampled(self, completion: Completion) -> None:
        """Append what the model sampled."""
        start = len(self._tokens)
        self._tokens += completion.tokens
        self._logprobs += completion.logprobs
        self._loss_mask += [1] * len(completion.tokens)
        for end, version in completion.spans:
            self._extend(start + end, version)

    def inserted(self, tokens: tuple[int, ...]) -> None:
        """Append what the environment says; the model must have sampled something before."""
        self._tokens += tokens
        self._logprobs += [0.0] * len(tokens)
        self._loss_mask += [0] * len(tokens)
        self._extend(len(self._tokens), self._spans[-1][1])

    def finish(self, reason: str, reward: float | None = None) -> Sample:
        """The sample."""
        return Sample(
            self.tokens, tuple(self._logprobs), tuple(self._loss_mask), tuple(self._spans), reason, reward
        )

    def _extend(self, end: int, version: int) -> None:
        if self._spans and self._spans[-1][1] == version:
            self._spans.pop()
        self._spans.append((end, version))
