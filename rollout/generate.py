"""Generates one prompt group: n samples of one prompt, concurrently on one engine."""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Annotated

from msgspec import Meta

from protocol.errors import EngineError
from protocol.messages import Rollout
from rollout.engines.base import Completion, Engine, Request, Sampling
from rollout.environments.base import Environment, Generate, Sample
from rollout.prompts.base import Prompt
from rollout.render import Renderer
from rollout.trajectory import assemble


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
) -> Rollout:
    """Generate the n samples of a group.

    If one sample fails, the others are cancelled. Cancelling the call leaves no request on the engine.

    Args:
        engine: generates.
        renderer: renders the prompt, and detokenizes the samples.
        environment: produces each sample.
        prompt: the prompt.
        group, token, engine_name: fields of the message, see `Rollout`.
        n: samples to generate.
        sampling: parameters of every generation.

    Raises:
        EngineError: the engine failed, or aborted a request itself.
        SettingsError: the prompt cannot be rendered, or does not fit the environment.
    """
    began = time.perf_counter()
    prompt_tokens = renderer.prompt_tokens(prompt)
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(
                    environment.run(
                        prompt, prompt_tokens, _generator(engine, sampling, group, i, token), renderer
                    ),
                    name=f"sample-{group}/{i}",
                )
                for i in range(n)
            ]
    except BaseExceptionGroup as failures:
        raise _first(failures) from None
    generate_s = time.perf_counter() - began
    samples: list[Sample] = [task.result() for task in running]
    return assemble(
        prompt, prompt_tokens, samples, [renderer.text(sample.tokens) for sample in samples],
        group=group, token=token, engine=engine_name, generate_s=generate_s,
    )  # fmt: skip


def _generator(engine: Engine, sampling: Sampling, group: int, sample: int, token: str) -> Generate:
    """Return the function by which the environment of one sample generates.

    Request ids contain the lease token, so that they differ if the group is leased again.
    """
    turn = 0

    async def generate(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
        nonlocal turn
        limited = (
            sampling
            if max_tokens is None
            else replace(sampling, max_tokens=min(max_tokens, sampling.max_tokens))
        )
        request = Request(f"{group}/{sample}.{turn}.{token}", tokens, limited)
        turn += 1
        completion = await engine.generate(request)
        if completion.finish_reason == "abort":
            raise EngineError(
                f"request {request.id}: the engine aborted it after {len(completion.tokens)} tokens"
            )
        return completion

    return generate


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
