"""Calls that fail, are malformed, or have pauses between them, as the `openai` package gets them."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from rollout.config import EnvironmentConfig
from rollout.engines.base import Completion, EngineConfig, Sampling
from rollout.engines.contract.models import tiny_model
from rollout.engines.registry import make_engine
from rollout.sessions.model_calls import ModelCalls
from tests.rollout.sessions.chats import renderer
from tests.rollout.sessions.serving import USER, served

TOOL: Any = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}


async def test_a_stream_whose_call_fails_ends_with_the_error() -> None:
    async def fails(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
        raise RuntimeError("the episode has ended")

    async with served(fails) as (client, _, _, _):
        stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        with pytest.raises(openai.APIError, match="the call failed"):
            [chunk async for chunk in stream]


async def test_an_unknown_token_fails_its_request_and_not_the_group(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 280}')
    engine = make_engine(EngineConfig(name="scripted", max_model_len=512), tmp_path, "engine.0")
    await engine.start()
    generate = ModelCalls(engine, Sampling(max_tokens=4), EnvironmentConfig(), 512, "7/0.{turn}.t")
    async with served(generate) as (client, _, _, _):
        with pytest.raises(openai.BadRequestError, match="token id 280 is out of range"):
            await client.completions.create(model="m", prompt=[280])
        assert generate.error is None
        await client.completions.create(model="m", prompt=[279])
    await engine.close()


async def test_arguments_that_are_no_text_are_given_to_the_template_as_written() -> None:
    called = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": "\\ud800"}'}}
    said: Any = [USER, {"role": "assistant", "tool_calls": [called]}, {"role": "tool", "content": "2"}]
    async with served() as (client, session, _, _):
        await client.chat.completions.create(model="m", messages=said, tools=[TOOL])
        assert "\\ud800" in session.renderer.text(session.tree.calls[0].inserted)


async def test_a_client_that_hangs_up_at_any_time_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({"messages": [USER], "stream": True})
    async with served() as (client, session, endpoint, key):
        url = urlsplit(endpoint.url(key))
        head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        for turns in range(20):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write((head + body).encode())
            for _ in range(turns):
                await asyncio.sleep(0)
            writer.transport.abort()
        await client.chat.completions.create(model="m", messages=[USER])
        await session.drained()
    assert caplog.messages == []


@pytest.mark.parametrize("name", ["scripted", "hf"])
async def test_sessions_that_wait_for_a_tool_hold_no_slot_of_the_engine(name: str, tmp_path: Path) -> None:
    """The engine has one slot; each call is made while the other sessions wait between theirs."""
    tiny_model(1).save_pretrained(tmp_path)
    config = EngineConfig(name=name, max_model_len=512, max_running=1)
    engine = make_engine(config, tmp_path, "engine.0")
    await engine.start()
    sampling = Sampling(max_tokens=4, stop_token_ids=renderer("tool use").stop_token_ids)
    async with asyncio.timeout(120), AsyncExitStack() as opened:
        opened.push_async_callback(engine.close)
        sessions = []
        for number in range(4):
            generate = ModelCalls(engine, sampling, EnvironmentConfig(), 512, f"{number}/0.{{turn}}.t")
            sessions.append((await opened.enter_async_context(served(generate)))[:2])
        for turn in range(3):
            for client, session in sessions:
                await client.chat.completions.create(model="any", messages=[USER] * (turn + 1))
                assert len(session.tree.calls) == turn + 1
                assert (await engine.occupancy()).running == 0
