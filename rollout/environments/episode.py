"""Presents an episode to an environment as text: model turns and inserted messages.

async def play(episode: Episode) -> float | None:
    said = await episode.generate()
    episode.insert("higher")
    ...
    return 1.0
"""

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from protocol.user_code import returned_number
from rollout.engines.base import Completion
from rollout.environments.base import Environment
from rollout.off_loop import TOKEN, off_loop
from rollout.prompts.base import Prompt
from rollout.render import PromptTooLong, Renderer
from rollout.sample import EpisodeOver, Generate, Sample, SampleBuilder
from rollout.sessions.record import SampleRecord, key_of
from rollout.sessions.results import Results


class Episode:
    """One sample in progress: a conversation that starts with the prompt.

    Sampled tokens are kept unchanged; only inserted text is tokenized.
    """

    def __init__(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> None:
        """Start an episode. If the attempt has a record, its calls are replayed."""
        self.prompt = prompt
        self.reward: float | None = None
        """Reward if `play` returns None or the episode is truncated."""
        self.turns = 0
        """Number of model turns so far."""
        self._prompt_tokens, self._generate, self._renderer = prompt_tokens, generate, renderer
        self._sample = SampleBuilder()
        self._inserted: list[str] = []
        self._last: Completion | None = None
        self._running = False
        self._record: SampleRecord | None = getattr(generate, "record", None)
        self._calls: list[tuple[int, int, int]] = []
        self.results = Results(self._record)
        """Recorded tool results, for `once`."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata of the prompt, such as the answer or task name."""
        return self.prompt.metadata

    async def generate(self, max_tokens: int | None = None) -> str:
        """Generate the model's next turn; return its text without special tokens.

        Args:
            max_tokens: token limit of this turn; None: the limit of `[sampling]` and the engine.

        Raises:
            EpisodeOver: no turn or no tokens are left; if uncaught, the episode ends truncated.
            RuntimeError: another turn of this episode is being generated.
        """
        if self._running:
            raise RuntimeError(
                "an episode's turns come one after the other: await generate() before the next"
            )
        self._running = True
        try:
            inserted = await self._inserted_tokens()
            completion = await self._answered(inserted, max_tokens)
        finally:
            self._running = False
        self._inserted.clear()
        self._last = completion
        self.turns += 1
        return await off_loop(TOKEN * len(completion.tokens), lambda: self._renderer.text(completion.tokens))

    def insert(self, text: str) -> None:
        """Insert a message before the model's next turn; consecutive texts are joined into one message.

        A message without a following turn is not part of the sample.

        Raises:
            RuntimeError: the model has had no turn yet.
            ValueError: the text contains half of a surrogate pair, which tokenizers reject; it is not
                inserted.
        """
        if self._last is None:
            raise RuntimeError(
                "insert() comes after the first turn of the model; before it there is the prompt"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half, at = text[error.start], error.start
            raise ValueError(
                f"insert(): the text has half of a surrogate pair, {half!r}, at character {at}"
            ) from None
        self._inserted.append(text)

    async def once(self, name: str, work: Callable[[], Awaitable[Any]]) -> Any:
        """Return the recorded result of a tool call, or run `work` and record its result.

        A recorded call never runs again, even after a crash. The result must be a JSON value.
        If the episode is recorded, the result is on disk on return. Exceptions are not
        recorded.

        Raises:
            RequestRefused: the name or result is invalid, a limit is reached, or the episode has ended.
            EpisodeError: the result cannot be recorded.
        """
        return await self.results.once(name, work)

    def finish(self, reward: float | None, *, truncated: bool = False) -> Sample:
        """Return the sample.

        Raises:
            ValueError: the model has had no turn, or the reward is not a finite number.
        """
        if self._last is None:
            raise ValueError("the episode ended before the model said anything")
        final = self.reward if reward is None else reward
        try:
            value = None if final is None else returned_number(final)
        except ValueError as shown:
            raise ValueError(
                f"the episode returned {shown}; a reward is a finite float, int, bool or None"
            ) from None
        ended = self._last.finish_reason if final is None else "environment"
        sample = self._sample.finish("length" if truncated else ended, value)
        if self._record is None:
            return sample
        others = self._record.abandoned([number for number, _, _ in self._calls])
        return replace(sample, calls=tuple(self._calls), recorded=(self._record.index, tuple(others)))

    async def _answered(self, inserted: tuple[int, ...], max_tokens: int | None) -> Completion:
        """Add the inserted tokens and the model's next turn to the sample."""
        context = self._prompt_tokens + self._sample.tokens + inserted
        generate = functools.partial(self._generate, context, max_tokens)
        if self._record is None:
            completion, trained = await generate(), True
        else:
            number, completion = await self._record.answer(
                key_of(str(max_tokens), context),
                self._calls[-1][0] if self._calls else -1,
                inserted if self._calls else context,
                generate,
                self._generate.count_replayed,  # type: ignore[attr-defined]
            )
            first = len(self._sample.tokens) + len(inserted)
            self._calls.append((number, first, first + len(completion.tokens)))
            trained = self._record.is_trained(completion)
        if inserted:
            self._sample.inserted(inserted)
        self._sample.sampled(completion, trained=trained)
        return completion

    async def _inserted_tokens(self) -> tuple[int, ...]:
        """Return the tokens of the inserted text. Raises EpisodeOver if they cannot fit."""
        if not self._inserted or self._last is None:
            return ()
        text, after = "\n".join(self._inserted), self._last.tokens
        max_model_len: int = getattr(self._generate, "max_model_len", 0)
        try:
            return await off_loop(
                len(text), lambda: self._renderer.turn_tokens(text, after=after, max_tokens=max_model_len)
            )
        except PromptTooLong as error:
            raise EpisodeOver(f"{error} fill engine.max_model_len {max_model_len}") from None


Play = Callable[[Episode], Awaitable[float | None]]
"""Plays one episode and returns its reward; None: `episode.reward`, or if unset, the verifiers' score."""


class EpisodeEnvironment(Environment):
    """Environment whose episodes are played by a coroutine; recorded if `has_calls`."""

    def __init__(self, play: Play) -> None:
        self._play = play

    async def run(
        self, prompt: Prompt, prompt_tokens: tuple[int, ...], generate: Generate, renderer: Renderer
    ) -> Sample:
        record: SampleRecord | None = getattr(generate, "record", None)
        if record is not None:
            await record.begin(replayable=True)
        episode = Episode(prompt, prompt_tokens, generate, renderer)
        reward, truncated = None, False
        try:
            reward = await self._play(episode)
        except EpisodeOver:
            truncated = True
        finally:
            episode.results.end("its episode is over")
        if record is not None:
            record.warn_of_remaining()
        return episode.finish(reward, truncated=truncated)
