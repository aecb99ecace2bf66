"""Agents in the worker: what they did by HTTP is the sample, branch by branch."""

import math
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from protocol.errors import EpisodeError, SettingsError
from protocol.rollout_view import decode_rollout
from rollout.abandoned_tasks import AbandonedTasks
from rollout.config import EnvironmentConfig
from rollout.environments.registry import make_environment
from tests.rollout.environments import agents
from tests.rollout.environments.groups import PROMPT, generated, generating
from tests.rollout.sessions.chats import renderer
from tests.services.bus.harness import eventually

HERE = "tests.rollout.environments.agents"


def config(function: str, **options: object) -> EnvironmentConfig:
    return EnvironmentConfig("agent", {"function": f"{HERE}:{function}", **options}, attempts=1)


async def test_the_calls_of_an_agent_are_its_sample(tmp_path: Path) -> None:
    rollout = await generated(tmp_path, config("plays"))
    view = decode_rollout(rollout)
    assert [row.sample for row in view.rows] == [0, 0, 1, 1]
    assert {row.environment_reward for row in view.rows} == {4.0}
    text = renderer("tool use")
    assert rollout.row_texts == tuple(text.marked(tuple(row.tokens.tolist())) for row in view.rows)
    assert "<|im_start|>user\nmore" in rollout.row_texts[0]
    assert (rollout.read_tokens > 0, rollout.cached_tokens) == (True, 0)
    for first, second in (view.rows[:2], view.rows[2:]):
        dialogue = [*view.prompt, *first.context, *first.tokens]
        shown = "".join(text.piece(int(token)) for token in dialogue)
        assert shown.startswith("<|im_start|>user\n2+2=<|im_end|>\n<|im_start|>assistant\n")
        assert "<|im_start|>user\nmore" in shown
        rewritten = [*view.prompt, *second.context, *second.tokens]
        shown = "".join(text.piece(int(token)) for token in rewritten)
        assert shown.startswith("<|im_start|>user\n2+2=: so far<|im_end|>\n<|im_start|>assistant\n")
        assert not second.sampled[: -len(second.tokens)].any()
        assert second.response == text.text(tuple(second.tokens[second.sampled].tolist()))


async def test_without_a_reward_verifiers_score_the_last_answer(tmp_path: Path) -> None:
    rollout = await generated(tmp_path, config("unscored"))
    assert (rollout.branches, rollout.environment_rewards) == (None, None)
    view = decode_rollout(rollout)
    assert tuple(view.prompt.tolist()) == renderer("tool use").encode(PROMPT.text)
    assert all(row.sampled.all() for row in view.rows)
    end = renderer("tool use").stop_token_ids[0]
    for row in view.rows:
        assert row.finish_reason == ("environment" if row.tokens[-1] == end else "length")


async def test_hidden_metadata_reaches_verifiers_and_no_agent(tmp_path: Path) -> None:
    rollout = await generated(tmp_path, config("shows"), n=1)
    assert agents.seen == {"answer": "4"}
    assert msgspec.msgpack.decode(rollout.metadata) == {"answer": "4", "hidden_tests": [1]}


async def test_an_agent_that_never_asks_has_failed(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match="without a call of the model"):
        await generated(tmp_path, config("silent"))


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        ({"reward": 1}, "dict"),
        ("1", "'1'"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        pytest.param(10**400, "10{59}", id="huge"),
    ],
)
async def test_result_of_an_agent_that_is_no_reward_is_named_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: object, shown: str
) -> None:
    monkeypatch.setattr(agents, "outcome", returned)
    says = (
        rf"{HERE}:returns returned {shown} \({agents.__file__}\); a reward is a finite float, int, bool or N"
    )
    with pytest.raises(EpisodeError, match=says):
        await generated(tmp_path, config("returns"))


@pytest.mark.parametrize("returned", [True, 1, 1.0])
async def test_any_number_that_an_agent_returns_is_its_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, returned: object
) -> None:
    monkeypatch.setattr(agents, "outcome", returned)
    view = decode_rollout(await generated(tmp_path, config("returns")))
    assert {row.environment_reward for row in view.rows} == {1.0}


async def test_an_agent_that_ignores_its_end_is_left_with_a_dead_key(tmp_path: Path) -> None:
    abandoned_tasks = AbandonedTasks(grace_s=0.01)
    left = "episode_s: 2 of 2 .*, and it ignored its cancellation"
    async with generating(tmp_path, replace(config("clings"), episode_s=0.5)) as generate:
        with pytest.raises(EpisodeError, match=left):
            await generate(abandoned_tasks=abandoned_tasks)
        await eventually(lambda: agents.refused == [410, 410])
        assert abandoned_tasks.counts() == {"left": 2, "ended": 0}
        agents.released.set()
        await eventually(lambda: abandoned_tasks.counts()["ended"] == 2)


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (config("not_asynchronous"), "is not asynchronous"),
        (config("absent"), "has no 'absent'"),
        (config("plays", tool_syntax="hermess"), "did you mean 'hermes'"),
        (config("plays", max_call=1), "did you mean 'max_calls'"),
        (config("plays", max_calls=10_001), "max_calls"),
    ],
)
def test_wrong_options_of_an_agent_are_named(made: EnvironmentConfig, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        make_environment(made)


async def test_a_taken_port_is_named_before_the_first_sample() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment = make_environment(replace(config("plays"), port=port, ports=1))
        with pytest.raises(SettingsError, match=rf"environment.port: .* 127\.0\.0\.1:{port}"):
            await environment.open()
        await environment.close()
