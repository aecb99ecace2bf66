"""Gives an environment its episode as text: what the model says, and what is inserted.

async def play(episode: Episode) -> float | None:
    said = await episode.generate()
    episode.insert("higher")
    ...
    return 1.0
"""

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rollout.engines.base import Completion
from rollout.environments.base import Environment, EpisodeOver, Generate, Sample, SampleBuilder
from rollout.prompts.base import Prompt
from rollout.render import Renderer


class Episode:
    """One sample while it is made: a conversation that begins with the prompt.

    Tokens that were sampled are kept as they are; only what is inserted is tokenized.
    """

    def __init__(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> None:
        self.prompt = prompt
        self.reward: float | None = None
        """Reward if the episode ends without another one: by `return` without a value, or truncated."""
        self.turns = 0
        """Turns of the model so far."""
        self._prompt_tokens, self._generate, self._renderer = prompt_tokens, generate, renderer
        self._sample = SampleBuilder()
        self._inserted: list[str] = []
        self._last: Completion | None = None
        self._running = False

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the prompt source knows of the prompt: answer, task name ..."""
        return self.prompt.metadata

    async def generate(self, max_tokens: int | None = None) -> str:
        """Let the model continue; return what it said, without special tokens.

        Args:
            max_tokens: of this turn; None: as many as `[sampling]` and the engine allow.

        Raises:
            EpisodeOver: no turn or no room is left; if nothing catches it, the episode ends truncated.
            RuntimeError: another turn of this episode is being generated.
        """
        if self._running:
            raise RuntimeError(
                "an episode's turns come one after the other: await generate() before the next"
            )
        self._running = True
        try:
            inserted = self._inserted_tokens()
            context = self._prompt_tokens + self._sample.tokens + inserted
            completion = await self._generate(context, max_tokens)
        finally:
            self._running = False
        if inserted:
            self._sample.inserted(inserted)
        self._inserted.clear()
        self._sample.sampled(completion)
        self._last = completion
        self.turns += 1
        return self._renderer.text(completion.tokens)

    def insert(self, text: str) -> None:
        """Insert a message before the model's next turn; several texts become one message.

        What no turn follows is not part of the sample.

        Raises:
            RuntimeError: the model has said nothing yet; what comes first is the prompt.
        """
        if self._last is None:
            raise RuntimeError(
                "insert() comes after the first turn of the model; before it there is the prompt"
            )
        self._inserted.append(text)

    def finish(self, reward: float | None, *, truncated: bool = False) -> Sample:
        """Return the sample.

        Raises:
            ValueError: the model has said nothing, or the reward is no finite number.
        """
        if self._last is None:
            raise ValueError("the episode ended before the model said anything")
        final = self.reward if reward is None else reward
        if final is not None and not (isinstance(final, (bool, int, float)) and math.isfinite(final)):
            raise ValueError(f"the episode returned {final!r}; a reward is a finite float, int, bool or None")
        ended = self._last.finish_reason if final is None else "environment"
        value = None if final is None else float(final)
        return self._sample.finish("length" if truncated else ended, value)

    def _inserted_tokens(self) -> tuple[int, ...]:
        if not self._inserted or self._last is None:
            return ()
        return self._renderer.turn_tokens("\n".join(self._inserted), after=self._last.tokens)


Play = Callable[[Episode], Awaitable[float | None]]
"""Plays one episode and returns its reward; None: `episode.reward`, or if that is None, too, the verifiers'
scores."""


class EpisodeEnvironment(Environment):
    """Environment whose episodes a coroutine plays."""

    def __init__(self, play: Play) -> None:
        self._play = play

    async def run(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> Sample:
        episode = Episode(prompt, prompt_tokens, generate, renderer)
        try:
            reward = await self._play(episode)
        except EpisodeOver:
            return episode.finish(None, truncated=True)
        return episode.finish(reward)
