"""Environment servers of `verifiers`: a peer of ours speaks their protocol; a slow test has the real one."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from openai import AsyncOpenAI

from protocol.errors import EpisodeError, SettingsError
from protocol.rollout_view import decode_rollout
from rollout.config import EnvironmentConfig
from rollout.environments.registry import make_environment
from rollout.environments.third_party.verifiers import EpisodeReading, Reply, TraceDelta
from rollout.prompts.base import Prompt
from tests.rollout.environments.groups import generated

HERE = Path(__file__).parent
Say = Callable[..., Awaitable[None]]
PACK = msgspec.msgpack.encode


def config(address: str, **limits: float) -> EnvironmentConfig:
    options = {"address": address, "silence_s": limits.pop("silence_s", 60.0)}
    return EnvironmentConfig("verifiers", options, attempts=1, **limits)  # type: ignore[arg-type]


async def served(
    folder: Path, answer: Callable[[dict[str, Any], Say], Awaitable[None]], **limits: float
) -> tuple[Any, list[bytes]]:
    """Generate a sample with a server that answers by `answer`; return it, and the requests that came."""
    requests: list[bytes] = []
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    async def serve() -> None:
        while True:
            client, number, method, payload = await socket.recv_multipart()
            requests.append(method)

            async def say(kind: bytes, data: Any, client: bytes = client, number: bytes = number) -> None:
                raw = data if isinstance(data, bytes) else PACK(data)
                await socket.send_multipart([client, number, kind, raw])

            if method == b"run":
                await answer(msgspec.msgpack.decode(payload), say)

    try:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve())
            try:
                return await generated(folder, config(f"tcp://127.0.0.1:{port}", **limits), n=1), requests
            finally:
                if "episode_s" in limits:
                    while b"cancel" not in requests:  # noqa: ASYNC110 (it is on its way)
                        await asyncio.sleep(0)
                serving.cancel()
    except* EpisodeError as failed:
        error = failed.exceptions[0]
    finally:
        context.destroy(linger=0)
    return error, requests


async def ask(request: dict[str, Any]) -> None:
    async with AsyncOpenAI(base_url=request["client"]["base_url"], api_key="none") as client:
        said = [{"role": "user", "content": request["task_data"]["prompt"]}]
        await client.chat.completions.create(model=request["model"], messages=said)  # type: ignore[arg-type]


def changed(**values: Any) -> dict[str, Any]:
    return {"trace": "a", "set": values, "nodes": [{"routing": {0: 1}}]}


ENDED = {"success": True, "head": {"ok": True, "errors": [], "id": "e"}, "traces": [{"id": "a", "nodes": 1}]}
SCORED = changed(rewards={"right": {"score": 0.5, "weight": 2.0}, "short": {"score": 0.25}}, ok=True)


async def test_the_weighted_rewards_of_the_trace_are_the_reward(tmp_path: Path) -> None:
    async def answer(request: dict[str, Any], say: Say) -> None:
        assert request["task_data"] == {"idx": 7, "prompt": "2+2=", "answer": "4"}
        await ask(request)
        await say(b"delta", changed(rewards={"right": None}))
        await say(b"delta", SCORED)
        await say(b"reply", ENDED)

    rollout, requests = await served(tmp_path, answer)
    (row,) = decode_rollout(rollout).rows
    assert row.environment_reward == 1.25
    assert requests == [b"run"]


@pytest.mark.parametrize(
    ("kind", "data", "why"),
    [
        (b"reply", b"\xc1", "speaks another protocol"),
        (b"reply", b"\x91" * 200 + b"\xc0", "speaks another protocol"),
        (b"delta", {"trace": 3}, "speaks another protocol"),
        (b"reply", {"success": False, "error": "ValidationError: answer\n missing"}, "answer missing"),
    ],
)
async def test_reply_without_an_answer_fails_the_sample(
    tmp_path: Path, kind: bytes, data: Any, why: str
) -> None:
    async def answer(request: dict[str, Any], say: Say) -> None:
        await say(kind, data)

    error, _ = await served(tmp_path, answer)
    assert why in str(error)


async def test_a_server_that_is_not_there_fails_the_sample(tmp_path: Path) -> None:
    with pytest.raises(EpisodeError, match=r"127\.0\.0\.1:1 has been silent for 0\.2 s: it does not run"):
        await generated(tmp_path, config("tcp://127.0.0.1:1", silence_s=0.1), n=1)


async def test_a_sample_that_ends_is_cancelled_in_the_server(tmp_path: Path) -> None:
    async def answer(request: dict[str, Any], say: Say) -> None:
        """Say nothing."""

    error, requests = await served(tmp_path, answer, episode_s=0.5)
    assert error.reason == "episode_s"
    assert requests == [b"run", b"cancel"]


@pytest.mark.parametrize(
    ("deltas", "reply", "why"),
    [
        ([changed(rewards={"right": None})], ENDED, "did not compute the reward right"),
        ([changed(ok=False), {"trace": "a", "errors": [{"type": "T", "message": "x"}]}], ENDED, "T: x"),
        ([SCORED], {**ENDED, "traces": []}, "with 0 traces"),
        ([], {**ENDED, "head": {"ok": False, "errors": [{"type": "E", "message": "m"}]}}, "E: m"),
        ([], {"success": True}, "without a reason"),
    ],
)
def test_an_episode_that_failed_has_no_reward(
    deltas: list[dict[str, Any]], reply: dict[str, Any], why: str
) -> None:
    reading = EpisodeReading()
    for delta in deltas:
        reading.apply(msgspec.convert(delta, TraceDelta))
    with pytest.raises(RuntimeError, match=why):
        reading.reward(msgspec.convert(reply, Reply))


def test_another_attempt_replaces_a_trace() -> None:
    reading = EpisodeReading()
    for delta in (changed(ok=False, rewards={"right": None}), {"trace": "a", "discard": True}):
        reading.apply(msgspec.convert(delta, TraceDelta))
    assert reading.reward(msgspec.convert(ENDED, Reply)) is None
    reading.apply(msgspec.convert(SCORED, TraceDelta))
    assert reading.reward(msgspec.convert(ENDED, Reply)) == 1.25


def test_an_address_must_be_given() -> None:
    with pytest.raises(SettingsError, match="is not an address of an environment server"):
        make_environment(EnvironmentConfig("verifiers", {"address": "http://127.0.0.1"}))


@pytest.mark.slow
async def test_the_server_of_verifiers_runs_samples(tmp_path: Path) -> None:
    """`make .venv-verifiers/.ready` sets up the environment that it needs."""
    python = Path(f"{sys.prefix}-verifiers") / "bin/python"
    python = Path(os.environ.get("TETHER_VERIFIERS_PYTHON", python))
    address = tmp_path / "address"
    process = subprocess.Popen(
        [str(python), str(HERE / "verifiers_server.py"), str(address)],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(HERE)},
    )
    try:
        async with asyncio.timeout(120):
            while not address.exists():
                assert process.poll() is None
                await asyncio.sleep(0.1)
        rollout = await generated(tmp_path, config(address.read_text()))
        rows = decode_rollout(rollout).rows
        assert [row.environment_reward for row in rows] == [2.5, 2.5]  # 0.5 for the answer, 1 for each turn
        assert not rows[0].sampled.all()
        with pytest.raises(EpisodeError, match="no such answer"):
            await generated(
                tmp_path,
                config(address.read_text()),
                Prompt("2+2=", metadata={"answer": "raise"}, index=7),
                n=1,
            )
        with pytest.raises(EpisodeError, match="answer"):
            await generated(tmp_path, config(address.read_text()), Prompt("2+2=", index=7), n=1)
    finally:
        process.kill()
        process.wait()
