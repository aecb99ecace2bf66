"""OpenEnv servers: a peer of ours speaks their protocol; a slow test has the real one."""

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from rollout.config import EnvironmentConfig
from rollout.engines.base import Completion
from rollout.environments.registry import make_environment
from rollout.environments.third_party.openenv import main
from rollout.prompts.base import Prompt
from rollout.render import RenderConfig, Renderer
from rollout.sample import Sample
from tests.rollout.environments.peers import openenv_peer
from tests.rollout.environments.test_environments import Player
from tests.rollout.tokenizers import write_tokenizer

SERVER = Path(__file__).with_name("openenv_server.py")
PROMPT = Prompt("?", metadata={"reset": {"seed": 7}})


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(write_tokenizer(tmp_path_factory.mktemp("plain"), more="{}\"':,"), RenderConfig())


async def played(config: EnvironmentConfig, renderer: Renderer, *lines: str) -> Sample:
    environment, player = make_environment(config), Player(renderer, *lines)
    return await environment.run(PROMPT, renderer.prompt_tokens(PROMPT), player, renderer)


def seen(text: str, reward: float | None = None, *, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"heard": text}, "reward": reward, "done": done}}


def failed(code: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": "no", "code": code}}


async def test_turns_are_actions_and_their_rewards_are_summed(renderer: Renderer) -> None:
    answers = seen(""), seen("up", 0.25), failed("VALIDATION_ERROR"), seen("", 1.0, done=True)
    async with openenv_peer(*answers) as config:
        sample = await played(config, renderer, "5", "6", "7")
    assert sample.reward == 1.25
    said = renderer.text(sample.tokens)
    assert said.startswith("5up6error: the p")
    assert said.endswith("7")
    assert '"message": "no"' in said
    assert sample.finish_reason == "environment"


async def test_an_action_may_be_the_turn_as_json(renderer: Renderer) -> None:
    async with openenv_peer() as config:
        config.options["action"] = ""
        environment = make_environment(EnvironmentConfig("openenv", config.options, max_turns=3))
        player = Player(renderer, '{"a": 1}', "[1]", "1")
        with pytest.raises(IndexError):  # the peer never ends an episode
            await environment.run(PROMPT, renderer.prompt_tokens(PROMPT), player, renderer)
        told = renderer.text(player.asked[-1][0])
    assert "{'a': 1}" in told
    assert told.count("error: an action is a") == 2


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([failed("CAPACITY_REACHED")], "CAPACITY_REACHED"),
        ([seen("")], "closed, or did not say"),
        ([{"type": "observation", "data": {"observation": {"other": 1}, "reward": 0, "done": False}}],
         "has no 'heard', but other"),
        ([seen(""), {"type": "observation", "data": {"observation": {"b": 1}, "reward": 1, "done": True}}],
         "has no 'heard', but b"),
        ([[]], r"server http://.* sent no observation: \[\]"),
        ([{"type": "observation", "data": None}], "server http://.* sent no observation"),
        ([{"type": "observation", "data": {"reward": 0, "done": False}}], "sent no observation"),
        ([seen(""), {"type": "error", "data": None}], "sent no observation"),
    ],
)  # fmt: skip
async def test_an_answer_that_is_no_observation_fails_the_episode(
    renderer: Renderer, answers: list[Any], why: str
) -> None:
    async with openenv_peer(*answers) as config:
        with pytest.raises((RuntimeError, SettingsError), match=why):
            await played(config, renderer, "5")


async def test_a_server_that_is_not_there_or_has_no_address_is_named(renderer: Renderer) -> None:
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:1: Cannot connect"):
        await played(EnvironmentConfig("openenv", {"url": "http://127.0.0.1:1"}), renderer, "5")
    with pytest.raises(SettingsError, match=r"options\.url: 'here' is not an address"):
        make_environment(EnvironmentConfig("openenv", {"url": "here"}))


async def test_pings_of_the_server_are_answered_while_the_model_generates(renderer: Renderer) -> None:
    heard, player = asyncio.Event(), Player(renderer, "5")

    async def generate(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
        async with asyncio.timeout(30):
            await heard.wait()
        return await player(tokens, max_tokens)

    async with openenv_peer(seen(""), seen("", 1.0, done=True), heard_pong=heard) as config:
        sample = await make_environment(config).run(
            PROMPT, renderer.prompt_tokens(PROMPT), generate, renderer
        )
    assert sample.reward == 1.0


async def test_prompts_are_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    async with openenv_peer(seen("up")) as config:
        words = [config.options["url"], str(prompts), "1", "heard"]
        assert await asyncio.to_thread(main, words) == 0
        assert json.loads(prompts.read_text()) == {"prompt": "up", "reset": {"seed": 0}}
        assert await asyncio.to_thread(main, words) == 2
    assert capsys.readouterr().err == f"{prompts} exists; give another file, or delete it\n"


async def test_a_server_that_rejects_the_reset_leaves_no_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    async with openenv_peer(failed("VALIDATION_ERROR")) as config:
        url = config.options["url"]
        assert await asyncio.to_thread(main, [url, str(prompts), "1"]) == 2
    assert capsys.readouterr().err.startswith(f"the OpenEnv server {url}: ")
    assert not prompts.exists()


@pytest.mark.parametrize(
    ("url", "count", "says"),
    [
        ("http://127.0.0.1:1", "2", "the OpenEnv server http://127.0.0.1:1: Cannot connect"),
        ("http://[", "2", "the OpenEnv server http://[: "),
        ("http://127.0.0.1:1", "0", "Plays an environment"),
    ],
)
def test_prompts_that_cannot_be_requested_leave_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, count: str, says: str
) -> None:
    assert main([url, str(tmp_path / "prompts.jsonl"), count]) == 2
    assert capsys.readouterr().err.startswith(says)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
async def test_a_server_of_openenv_plays_and_writes_prompts(renderer: Renderer, tmp_path: Path) -> None:
    """`make .venv-openenv/.ready` sets up the environment that it needs."""
    python = os.environ.get("TETHER_OPENENV_PYTHON", f"{sys.prefix}-openenv/bin/python")
    with subprocess.Popen([python, SERVER], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while (found := re.search(r"running on (http://\S+)", line := process.stderr.readline())) is None:
            assert line, process.poll()
        options = {"url": found[1], "observation": "text"}
        try:
            sample = await played(EnvironmentConfig("openenv", options), renderer, "5", "8", "7")
            assert (renderer.text(sample.tokens), sample.reward) == ("5up8down7", 0.5)
            config = EnvironmentConfig("openenv", {**options, "action": ""})
            sample = await played(config, renderer, "{}", '{"message": "7"}')
            assert sample.reward == 1.0
            with pytest.raises(RuntimeError, match="broken"):
                await played(EnvironmentConfig("openenv", options), renderer, "end")
            prompts = tmp_path / "prompts.jsonl"
            assert await asyncio.to_thread(main, [found[1], str(prompts), "2", "text"]) == 0
        finally:
            process.kill()
    assert [json.loads(line) for line in prompts.read_text().splitlines()] == [
        {"prompt": "? 0", "reset": {"seed": 0}},
        {"prompt": "? 1", "reset": {"seed": 1}},
    ]
