"""Generates groups with a scripted engine and a real tokenizer."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from protocol.messages import Rollout
from rollout.config import EnvironmentConfig
from rollout.engines.base import EngineConfig, Sampling
from rollout.engines.scripted import ScriptedEngine
from rollout.environments.registry import make_environment
from rollout.generate import generate_group
from rollout.prompts.base import Prompt
from rollout.sessions.record import Recording
from tests.rollout.sessions.chats import renderer

PROMPT = Prompt("2+2=", metadata={"answer": "4", "hidden_tests": [1]}, index=7)
"""A prompt with metadata that no harness gets."""


class Serving(ScriptedEngine):
    """The scripted engine serving version 5."""

    def __init__(self, config: EngineConfig, model_dir: Path, incarnation: str) -> None:
        super().__init__(config, model_dir, incarnation)
        self._served = replace(self._served, epoch="e", version=5)


Generated = Callable[..., Awaitable[Rollout]]


@asynccontextmanager
async def generating(
    folder: Path,
    config: EnvironmentConfig,
    make: type[Serving] = Serving,
    *,
    tokens: int = 8,
    room: int = 512,
) -> AsyncIterator[Generated]:
    """Start an engine and an environment; yields what generates group 7 under the lease `t`.

    Args:
        folder: for the model's configuration.
        config: of the environment.
        make: makes the engine.
        tokens: that a turn may have.
        room: tokens that an episode may have.
    """
    (folder / "config.json").write_text(json.dumps({"vocab_size": 280}))
    engine = make(EngineConfig(name="scripted", max_model_len=room), folder, "engine.0")
    environment = make_environment(config)
    await engine.start()
    text = renderer("tool use")

    async def generate(prompt: Prompt = PROMPT, n: int = 2, **more: Any) -> Rollout:
        sampling = Sampling(max_tokens=tokens, stop_token_ids=text.stop_token_ids)
        return await generate_group(
            engine, text, environment, prompt, group=7, token="t", n=n, engine_name="engine.0",
            sampling=sampling, config=config, max_model_len=room, **more,
        )  # fmt: skip

    try:
        yield generate
    finally:
        await environment.close()
        await engine.close()


async def generated(
    folder: Path,
    config: EnvironmentConfig,
    prompt: Prompt = PROMPT,
    n: int = 2,
    recording: Recording | None = None,
) -> Rollout:
    """Generate one group."""
    async with generating(folder, config) as generate:
        return await generate(prompt, n, recording=recording)
