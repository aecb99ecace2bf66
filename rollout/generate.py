"""Generates one prompt group: n samples of one prompt, concurrently on one engine."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from protocol.messages import Rollout
from rollout.engines.base import Engine, Sampling
from rollout.environments.base import Environment, EnvironmentConfig, Sample
from rollout.episodes import EpisodeReport, Episodes
from rollout.prompts.base import Prompt
from rollout.render import Renderer
from rollout.sessions.record import Recording
from rollout.trajectory import assemble, turn_texts

DEFAULT = EnvironmentConfig()


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Section `[sampling]`: how samples are drawn for training."""

    samples_per_prompt: Annotated[int, Meta(ge=1, le=10**5)] = 8
    """n, the samples of a group."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    """Divides the logits before sampling, in engine and trainer alike. Training refuses less than 0.01."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Refused below 1 in training, where engine and trainer have to use the same distribution; see
    `eval.top_p`."""
    top_k: Annotated[int, Meta(ge=0, le=10**7)] = 0
    """Refused above 0 in training, as `top_p` is below 1; see `eval.top_k`."""
    max_tokens: Annotated[int, Meta(ge=1, le=10**7)] = 128
    """Limit of one generation, tokens. An environment with several turns may set less for each."""


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
    least: int | None = None,
    report: Callable[[EpisodeReport], None] = lambda report: None,
    ended: Callable[[], str] = lambda: "",
    recording: Recording | None = None,
    with_turn_texts: bool = False,
) -> Rollout:
    """Generate the n samples of a group.

    If the group fails, all its samples are cancelled. Cancelling the call leaves no request on the engine.

    Args:
        engine, renderer: generate, render the prompt, and detokenize the samples.
        environment: produces each sample.
        prompt: the prompt.
        group, token, engine_name: fields of the message, see `Rollout`.
        n, sampling: samples to generate, and the parameters of every generation.
        config, max_model_len: limits of episodes, and of the tokens of prompt and sample; 0: none is known.
        least: samples that must remain when others have failed; None: all.
        report: called after each attempt at a sample.
        ended: returns why the group is cancelled, for harnesses whose calls are refused from then on.
        recording: records the calls of sessions; None: they are not recorded.
        with_turn_texts: whether the message has the text of each turn, for verifiers that score turns.

    Raises:
        SettingsError: the prompt cannot be rendered; and whatever `Episodes.samples` raises.
    """
    began, prompt_tokens = time.perf_counter(), renderer.prompt_tokens(prompt)
    episodes = Episodes(
        environment, prompt, prompt_tokens, renderer, engine, sampling, config, max_model_len, report, ended,
        recording,
    )  # fmt: skip
    samples = await episodes.samples(n, n if least is None else least, f"{group}/{{sample}}.{{turn}}.{token}")
    rollout = assemble(
        prompt, prompt_tokens, samples, [_response(sample, renderer) for sample in samples],
        group=group, token=token, engine=engine_name, generate_s=time.perf_counter() - began,
    )  # fmt: skip
    return turn_texts(rollout, renderer.text) if with_turn_texts else rollout


def _response(sample: Sample, renderer: Renderer) -> str:
    return renderer.text(sample.tokens) if sample.response is None else sample.response
