"""What every environment keeps: masks, spans, limits, and a cancellation that leaves nothing behind."""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import EngineError
from protocol.messages import Rollout
from protocol.rollout_view import decode_rollout
from rollout.config import EnvironmentConfig
from rollout.engines.base import Completion, EngineConfig, Request, Sampling
from rollout.engines.scripted import ScriptedEngine
from rollout.environments.registry import ENVIRONMENTS, ON_DATA, make_environment
from rollout.generate import generate_group
from rollout.prompts.base import Prompt, PromptConfig
from rollout.prompts.registry import make_source
from rollout.render import RenderConfig, Renderer
from tests.changes import slow_unless_changed
from tests.rollout.environments.agents import ASKS, SERVES
from tests.rollout.environments.peers import PEERS
from tests.rollout.tokenizers import TEMPLATE, write_tokenizer

QUESTION = Prompt("3+4=", metadata={"answer": "7"}, index=12)
SENTENCES = ("```calculator\n3+4\n```", "```python\n3+4\n```", "[4]", "8", "#### 7", "[up]")
NAMES = ("my_own", "standing_command", *(name for name in ENVIRONMENTS if name not in (ON_DATA, "harbor")))
"""Environments; harbor is `command` in a sandbox."""
CASES = {
    "my_own": EnvironmentConfig("tests.rollout.environments.own_game:Game", {"turns": 3}),
    "agent": EnvironmentConfig("agent", {"function": "tests.rollout.environments.agents:talks"}),
    "command": EnvironmentConfig("command", {"command": [sys.executable, "-c", ASKS]}),
    "standing_command": EnvironmentConfig(
        "command", {"command": [sys.executable, "-c", SERVES], "processes": 3}
    ),
    "tools": EnvironmentConfig("tools", {"tools": ["calculator", "python"]}),
}
UNORDERED = {"agent", "command", "standing_command", "server", "verifiers"}
"""Environments whose samples ask in any order, so that each run has other answers."""
TURNS = 6


class Talking(ScriptedEngine):
    """The scripted engine, but it says sentences, and a version passes with each request."""

    def __init__(self, model_dir: Path, renderer: Renderer, config: EngineConfig) -> None:
        super().__init__(config, model_dir, "engine.1")
        self._vocab = 1000
        self._said = [renderer.prompt_tokens(Prompt(text)) for text in SENTENCES]
        self.answered = 0
        self.limits: list[int] = []

    async def generate(self, request: Request) -> Completion:
        self.limits.append(request.sampling.max_tokens)
        version = self.answered
        await super().generate(request)
        tokens = self._said[self.answered % len(SENTENCES)][: request.sampling.max_tokens]
        self.answered += 1
        return Completion(tokens, (-0.5,) * len(tokens), ((len(tokens), version),), "stop")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            None,
            id="plain",
            marks=slow_unless_changed("rollout/environments/", "rollout/sessions/", "rollout/render.py"),
        ),
        pytest.param(TEMPLATE, id="chat"),
    ],
)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    letters = "`#*/[]():'\"_,!<>ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    return write_tokenizer(tmp_path_factory.mktemp("model"), template=request.param, more=letters)


async def generated(name: str, engine: Talking, model_dir: Path, **limits: float) -> Rollout:
    if name in PEERS:
        async with PEERS[name]() as config:
            return await generated_by(config, engine, model_dir, **limits)
    return await generated_by(CASES.get(name, EnvironmentConfig(name)), engine, model_dir, **limits)


async def generated_by(
    config: EnvironmentConfig, engine: Talking, model_dir: Path, **limits: float
) -> Rollout:
    prompt = QUESTION
    if config.name == "textarena":
        prompt = make_source(PromptConfig(source="textarena", families=("GuessTheNumber-v0",))).at(0)
    config = replace(config, **limits)
    environment = make_environment(config)
    try:
        return await generate_group(
            engine, Renderer(model_dir, RenderConfig()), environment, prompt,
            group=12, token="t", n=3, sampling=Sampling(max_tokens=40), engine_name="e", config=config,
            max_model_len=engine._config.max_model_len,
        )  # fmt: skip
    finally:
        await environment.close()


def talking(model_dir: Path, **config: float) -> Talking:
    renderer = Renderer(model_dir, RenderConfig(chat_template="off"))
    return Talking(model_dir, renderer, EngineConfig(name="scripted", **{"max_model_len": 4096, **config}))


@pytest.mark.parametrize("name", NAMES)
async def test_masks_and_spans_are_of_what_the_model_sampled(name: str, model_dir: Path) -> None:
    engine = talking(model_dir)
    rollout = await generated(name, engine, model_dir, max_turns=TURNS)
    samples = decode_rollout(rollout).rows
    assert len(samples) == 3
    known = set(engine._said)
    for sample in samples:
        assert sample.sampled[0]
        assert sample.sampled[-1]
        runs: dict[int, list[int]] = {}
        for token, version, sampled in zip(sample.tokens, sample.versions, sample.sampled, strict=True):
            if sampled:
                runs.setdefault(int(version), []).append(int(token))
        assert 1 <= len(runs) <= TURNS
        assert {tuple(run) for run in runs.values()} <= {said[:limit] for said in known for limit in (16, 40)}
        assert (sample.logprobs[sample.sampled] == -0.5).all()
        assert (sample.logprobs[~sample.sampled] == 0).all()
        assert sorted(runs) == list(dict.fromkeys(sample.versions.tolist()))
    assert max(engine.limits) <= 40
    assert not engine._running


@pytest.mark.parametrize("name", NAMES)
async def test_a_sample_stays_within_the_context_of_the_engine(name: str, model_dir: Path) -> None:
    first = await generated(name, talking(model_dir), model_dir, max_turns=TURNS)  # some have no last turn
    prompt = len(first.prompt_tokens.numpy())
    longest = prompt + 45
    engine = talking(model_dir, max_model_len=longest)
    rollout = await generated(name, engine, model_dir, max_turns=TURNS)
    assert max(rollout.lengths.numpy()) <= 45
    if max(first.lengths.numpy()) <= 45 and name not in UNORDERED:
        assert rollout.lengths.numpy().tolist() == first.lengths.numpy().tolist()


@pytest.mark.parametrize("name", NAMES)
async def test_cancelling_an_environment_leaves_nothing(name: str, model_dir: Path) -> None:
    engine, before = talking(model_dir, seconds_per_token=3600.0), _children()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(generated(name, engine, model_dir))
        while len(engine._running) < 3:  # noqa: ASYNC110 (games begin in a thread)
            await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()
    assert not engine._running
    assert len(asyncio.all_tasks()) == 1
    assert _children() <= before


@pytest.mark.parametrize("name", NAMES)
async def test_an_engine_that_has_ended_is_no_failed_sample(name: str, model_dir: Path) -> None:
    engine = talking(model_dir)
    await engine.close()
    with pytest.raises(EngineError, match="is closed"):
        await generated(name, engine, model_dir)


def _children() -> set[str]:
    """Return the processes that this one has started and that are there, those of other tests too."""
    pid = os.getpid()
    return set(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
