"""Generates one prompt group: n samples of one prompt, concurrently on one engine."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from protocol.errors import EngineError, EpisodeError, InvalidRequest
from protocol.messages import Rollout
from protocol.tensors import Array
from rollout.abandoned_tasks import AbandonedTasks
from rollout.config import EnvironmentConfig
from rollout.engines.base import Engine, Sampling
from rollout.environments.base import Environment
from rollout.episodes import EpisodeReport, Episodes
from rollout.off_loop import TOKEN, off_loop, size_of
from rollout.prompts.base import Prompt
from rollout.render import Renderer
from rollout.sample import NOTHING_READ, PromptTokens, Sample
from rollout.sessions.model_calls import CANCELLED
from rollout.sessions.record import Recording
from rollout.trajectory import assemble, turn_texts

DEFAULT = EnvironmentConfig()
ENGINE = "engine"
"""Failure reason of a group whose engine failed, independent of its prompt."""


async def generate_group(
    engine: Engine,
    renderer: Renderer,
    environment: Environment,
    prompt: Prompt,
    *,
    group: int,
    token: str,
    n: int,
    sampling: Sampling,
    engine_name: str,
    config: EnvironmentConfig = DEFAULT,
    max_model_len: int = 0,
    min_samples: int | None = None,
    keep: int = 0,
    report: Callable[[EpisodeReport], None] = lambda report: None,
    group_end_reason: Callable[[], str] = lambda: "",
    recording: Recording | None = None,
    abandoned_tasks: AbandonedTasks | None = None,
    with_turn_texts: bool = False,
) -> Rollout:
    """Generate the n samples of a group.

    A failure of the group cancels all its samples. Cancelling the call leaves no request on the engine.

    Args:
        engine, renderer: generate the samples; render the prompt and detokenize.
        environment, prompt: producer of each sample, and its input.
        group, token, engine_name: fields of the message, see `Rollout`.
        n, min_samples, keep: see `Episodes.samples`; `min_samples` None: every kept sample is required.
        sampling, config, max_model_len: sampling parameters, episode limits and token limit.
        report, group_end_reason, recording, abandoned_tasks: see `Episodes`; no tasks: a new set.
        with_turn_texts: whether to include the text of each turn for verifiers.

    Raises:
        SettingsError: the prompt cannot be rendered. Further errors: see `Episodes.samples`.
    """
    began, attempts, size = time.perf_counter(), _Attempts(report), size_of((prompt.text, prompt.messages))
    prompt_tokens = await off_loop(size, functools.partial(renderer.prompt_tokens, prompt))
    episodes = Episodes(
        environment, prompt, prompt_tokens, renderer, engine, sampling, config, max_model_len, attempts.add,
        group_end_reason, recording, AbandonedTasks() if abandoned_tasks is None else abandoned_tasks,
    )  # fmt: skip
    name = f"{group}/{{sample}}.{{turn}}.{token}"
    samples = await episodes.samples(n, (keep or n) if min_samples is None else min_samples, name, keep)
    make = functools.partial(
        _rollout, prompt, prompt_tokens, samples, renderer, with_turn_texts, group=group, token=token,
        engine=engine_name, generate_s=time.perf_counter() - began,
    )  # fmt: skip
    return attempts.counted_in(await off_loop(TOKEN * sum(map(_length, samples)), make))


def failure_reason(error: Exception) -> str:
    """Return why generating or sending a group failed: `episode`, `engine` or `prompt`."""
    if isinstance(error, EpisodeError):
        return "episode"
    return ENGINE if isinstance(error, EngineError) and not isinstance(error, InvalidRequest) else "prompt"


@dataclass(slots=True)
class _Attempts:
    """Token counts over all attempts at the samples of a group; forwards each report."""

    report: Callable[[EpisodeReport], None]
    read: PromptTokens = NOTHING_READ
    """Prompt tokens sent to the engine."""
    cancelled: list[int] = field(default_factory=list)
    """Tokens generated for each cancelled sample."""

    def add(self, attempt: EpisodeReport) -> None:
        for prompts in (attempt.first_prompt, attempt.later_prompts):
            self.read = self.read.plus(prompts.total, prompts.cached)
        if attempt.failure == CANCELLED:
            self.cancelled.append(attempt.tokens)
        self.report(attempt)

    def counted_in(self, rollout: Rollout) -> Rollout:
        """Return the group's message with the token counts filled in."""
        return msgspec.structs.replace(
            rollout,
            read_tokens=self.read.total,
            cached_tokens=self.read.cached,
            cancelled=Array.of(self.cancelled, "int32") if self.cancelled else None,
        )


def _rollout(
    prompt: Prompt,
    prompt_tokens: tuple[int, ...],
    samples: Sequence[Sample],
    renderer: Renderer,
    with_turn_texts: bool,
    **fields: Any,
) -> Rollout:
    """Return the message of the samples, with row texts if a response differs from the text of its sample."""
    responses = [
        renderer.text(sample.tokens) if sample.response is None else sample.response for sample in samples
    ]
    rollout = assemble(prompt, prompt_tokens, samples, responses, **fields)
    no_rows = all(sample.response is None for sample in samples)
    rollout = turn_texts(rollout, renderer.text) if with_turn_texts or no_rows else rollout
    if no_rows:
        return rollout
    rows = np.split(rollout.tokens.numpy(), np.cumsum(rollout.lengths.numpy())[:-1])
    texts = tuple(renderer.marked(tuple(row.tolist())) for row in rows)
    return msgspec.structs.replace(rollout, row_texts=texts)


def _length(sample: Sample) -> int:
    """Return the number of tokens in all rows of a sample."""
    return len(sample.tokens) + sum(len(branch.tokens) for branch in sample.branches)
