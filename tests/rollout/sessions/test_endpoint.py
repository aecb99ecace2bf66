"""The endpoint as its clients know it: the `openai` package against the engines `scripted` and `hf`."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI

from protocol.errors import SettingsError
from rollout.config import EnvironmentConfig
from rollout.engines.base import Completion, Engine, EngineConfig, Sampling
from rollout.engines.contract.models import tiny_model
from rollout.engines.registry import make_engine
from rollout.sessions.answers.reader import AnswerReader
from rollout.sessions.branches import branches_of
from rollout.sessions.endpoint import SessionEndpoint
from rollout.sessions.model_calls import ModelCalls
from rollout.sessions.session import SessionLimits
from tests.rollout.sessions.chats import renderer
from tests.rollout.sessions.serving import HELLO, USER, served, thinks

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

TOOL: Any = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}


@pytest.fixture(params=["scripted", "hf"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    tiny_model(1).save_pretrained(tmp_path)
    engine = make_engine(EngineConfig(name=request.param, max_model_len=512), tmp_path, "engine.0")
    await engine.start()
    yield engine
    await engine.close()


async def test_the_endpoint_records_what_an_engine_samples(engine: Engine) -> None:
    text = renderer("tool use")
    sampling = Sampling(max_tokens=12, stop_token_ids=text.stop_token_ids, seed=1)
    generate = ModelCalls(engine, sampling, EnvironmentConfig(), 512, "7/0.{turn}.t")
    async with served(generate) as (client, session, _, _):
        messages: list[Any] = [USER]
        for _ in range(3):
            answer = await client.chat.completions.create(
                model="any", messages=messages, logprobs=True, max_tokens=5
            )
            (choice,) = answer.choices
            completion = session.tree.calls[-1].completion
            assert answer.usage is not None
            assert answer.usage.completion_tokens == len(completion.tokens) <= 5
            assert choice.finish_reason == completion.finish_reason
            assert choice.message.content == text.text(completion.tokens)
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert [entry.logprob for entry in choice.logprobs.content] == list(completion.logprobs)
            messages += [choice.message, {"role": "user", "content": "more"}]
        (branch,) = branches_of(session.tree)
        assert sum(branch.loss_mask) == sum(len(call.completion.tokens) for call in session.tree.calls)


async def test_a_stream_has_the_answer_of_a_plain_call() -> None:
    async with served() as (client, session, _, _):
        stream = await client.chat.completions.create(
            model="m", messages=[USER], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == HELLO
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(session.tree.calls[0].completion.tokens)


async def test_a_completion_continues_text_and_tokens() -> None:
    async with served() as (client, session, _, _):
        first = await client.completions.create(model="m", prompt="the", logprobs=0)
        assert first.choices[0].text == HELLO
        assert first.choices[0].logprobs is not None
        pieces = first.choices[0].logprobs.tokens or []
        assert "".join(pieces) == HELLO
        assert first.choices[0].logprobs.text_offset == [len("".join(pieces[:i])) for i in range(len(pieces))]
        await client.completions.create(model="m", prompt=f"the{HELLO}, and", max_tokens=2)
        await client.completions.create(model="m", prompt=[20, 21, 22])
        stream = await client.completions.create(model="m", prompt="x", stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == [HELLO]
        first_row, *others = branches_of(session.tree)
        assert sum(first_row.loss_mask) == len(renderer("tool use").encode(HELLO)) + 2
        assert len(others) == 2


async def test_tool_calls_come_parsed_and_their_results_continue() -> None:
    async def calls(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
        said = renderer("tool use").encode('so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        return Completion(said, (-0.5,) * len(said), ((len(said), 0),), "stop")

    async with served(calls) as (client, session, _, _):
        for stream in (False, True):
            answer: Any = await client.chat.completions.create(
                model="m", messages=[USER], tools=[TOOL], stream=stream
            )
            if stream:
                chunks = [chunk async for chunk in answer]
                (call,) = next(c.choices[0].delta.tool_calls for c in chunks if c.choices[0].delta.tool_calls)
                assert chunks[-1].choices[0].finish_reason == "tool_calls"
            else:
                message = answer.choices[0].message
                (call,) = message.tool_calls
                assert (message.content, answer.choices[0].finish_reason) == ("so", "tool_calls")
            assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        await client.chat.completions.create(model="m", messages=[USER, message, result], tools=[TOOL])
        assert session.tree.calls[-1].parent in session.tree.calls[:2]
        plain = await client.chat.completions.create(
            model="m", messages=[USER], tools=[TOOL], tool_choice="none"
        )
        assert plain.choices[0].message.tool_calls is None


Ask = Callable[[AsyncOpenAI], Awaitable[Any]]


def chat(**fields: Any) -> Ask:
    return lambda client: client.chat.completions.create(**{"model": "m", "messages": [USER], **fields})


def complete(**fields: Any) -> Ask:
    return lambda client: client.completions.create(**{"model": "m", **fields})


def said(role: str, content: Any) -> Ask:
    return chat(messages=[{"role": role, "content": content}])


IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]


@pytest.mark.parametrize(
    ("ask", "code", "why"),
    [
        (chat(temperature=0.5), "unsupported_parameter", r"\[sampling\] decides"),
        (chat(n=2), "unsupported_parameter", "n = 2"),
        (chat(stop=["x"]), "unsupported_parameter", "stop"),
        (chat(tools=[TOOL], tool_choice="required"), "unsupported_value", "'required'"),
        (chat(response_format={"type": "json_object"}), "unsupported_parameter", "json_object"),
        (chat(extra_body={"best": 1}), "unknown_parameter", "best is not known"),
        (chat(messages=[]), "invalid_value", "at least one message"),
        (said("judge", ""), "invalid_value", "'judge'"),
        (said("user", IMAGE), "invalid_value", "only text"),
        (chat(max_tokens=0), "invalid_value", "at least 1"),
        (complete(prompt=""), "invalid_value", "prompt"),
        (lambda client: client.embeddings.create(model="m", input="x"), "not_found", "Not Found"),
        (said("user", "x" * 2**20), "body_too_large", "over 1048576"),
    ],
)
async def test_a_refusal_is_the_clients_own_exception(ask: Ask, code: str, why: str) -> None:
    async with served(body_mb=1) as (client, session, _, _):
        with pytest.raises(openai.APIStatusError, match=why) as refused:
            await ask(client)
        assert refused.value.code == code
        assert session.tree.calls == []


GARBAGE = (
    b"",
    b"{",
    b"[" * 100_000,
    b"\xff\xfe",
    b"null",
    b'{"messages": {"a": 1}}',
    b'{"messages": [[]]}',
    b'{"messages": [{"role": ["user"]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "tools": [3]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    '{"messages": [{"role": "user", "content": "\\ud800"}]}'.encode("utf-16"),
    b'{"prompt": [99999999999999]}',
)


async def test_garbage_is_refused_and_service_continues() -> None:
    async with served() as (client, session, endpoint, key), aiohttp.ClientSession() as http:
        url = endpoint.url(key) + "/chat/completions"
        for body in GARBAGE:
            path = url.replace("/chat", "") if b"prompt" in body else url
            async with http.post(path, data=body) as response:
                assert response.status == 400
                assert (await response.json())["error"]["message"]
        await client.chat.completions.create(model="m", messages=[USER])
        assert len(session.tree.calls) == 1
        assert [model.id async for model in client.models.list()] == ["policy"]


async def test_a_body_that_cannot_be_unpacked_is_refused() -> None:
    async with served() as (_, _, endpoint, key), aiohttp.ClientSession() as http:
        packed = {"data": b"no gzip", "headers": {"Content-Encoding": "gzip"}}
        async with http.post(endpoint.url(key) + "/chat/completions", **packed) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "invalid_body")


async def test_a_key_is_of_one_session_and_dies_with_it() -> None:
    async with served() as (client, _, endpoint, key):
        await client.chat.completions.create(model="m", messages=[USER])
        with pytest.raises(openai.NotFoundError, match="no session with this key"):
            await client.with_options(base_url=endpoint.url("guess")).chat.completions.create(
                model="m", messages=[USER]
            )
        endpoint.end(key, "the episode is over")
        endpoint.end(key, "again")
        with pytest.raises(openai.APIStatusError, match="the episode is over") as refused:
            await client.chat.completions.create(model="m", messages=[USER])
        assert refused.value.status_code == 410


async def test_a_call_that_runs_when_its_session_ends_is_answered_why() -> None:
    running = asyncio.Event()

    async def forever(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
        running.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def read(client: AsyncOpenAI, **fields: Any) -> None:
        answer: Any = await client.chat.completions.create(model="m", messages=[USER], **fields)
        assert [chunk async for chunk in answer]

    async def ask(client: AsyncOpenAI, **fields: Any) -> str:
        with pytest.raises(openai.APIError) as refused:
            await read(client, **fields)
        return str(refused.value)

    for fields in ({}, {"stream": True}):
        running.clear()
        async with served(forever) as (client, session, endpoint, key), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(ask(client, **fields))
            await running.wait()
            endpoint.end(key, "time is up")
            assert "time is up" in await task
            assert session.tree.calls == []


async def test_a_client_that_hangs_up_ends_its_call() -> None:
    running, ended = asyncio.Event(), asyncio.Event()

    async def forever(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    for stream in (False, True):
        running.clear()
        ended.clear()
        async with served(forever) as (_, session, endpoint, key), aiohttp.ClientSession() as http:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(
                    _posted(http, endpoint.url(key), {"messages": [USER], "stream": stream})
                )
                await running.wait()
                task.cancel()
            await ended.wait()
            assert session.tree.calls == []


async def _posted(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with http.post(f"{url}/chat/completions", json=body) as response:
        await response.read()


async def test_calls_of_one_session_may_run_at_once() -> None:
    async with served(limits=SessionLimits(max_calls=8)) as (client, session, _, _):
        async with asyncio.TaskGroup() as tasks:
            for i in range(8):
                message: Any = {"role": "user", "content": str(i)}
                tasks.create_task(client.chat.completions.create(model="m", messages=[message]))
        assert len(branches_of(session.tree)) == 8
        with pytest.raises(openai.PermissionDeniedError, match="max_calls"):
            await client.chat.completions.create(model="m", messages=[USER])


async def test_a_taken_port_is_named() -> None:
    async with served() as (_, _, endpoint, key):
        port = int(endpoint.url(key).split(":")[2].split("/")[0])
        with pytest.raises(SettingsError, match=f"127.0.0.1:{port}"):
            await SessionEndpoint(EnvironmentConfig(port=port, ports=1)).start()


def anthropic_client(endpoint: SessionEndpoint, key: str) -> "AsyncAnthropic":
    from anthropic import AsyncAnthropic  # seconds of each process that collects this file

    return AsyncAnthropic(base_url=endpoint.url(key).removesuffix("/v1"), api_key=key)


async def test_messages_are_answered_plain_and_streamed() -> None:
    async with served() as (_, session, endpoint, key), anthropic_client(endpoint, key) as client:
        asked: Any = {"model": "m", "max_tokens": 50, "system": "be brief", "messages": [USER]}
        answer = await client.messages.create(**asked)
        assert (answer.content[0].type, answer.stop_reason) == ("text", "max_tokens")
        async with client.messages.stream(**asked) as stream:
            assert "".join([text async for text in stream.text_stream]) == HELLO
            final = await stream.get_final_message()
        assert final.content[0].model_dump()["text"] == answer.content[0].model_dump()["text"] == HELLO
        assert final.usage.output_tokens == len(session.tree.calls[1].completion.tokens)
        again = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": "more"}]
        await client.messages.create(**{**asked, "messages": again})
        assert session.tree.calls[2].parent is session.tree.calls[1]
        assert answer.usage.input_tokens == len(session.tree.calls[0].inserted)


async def test_tools_of_messages_are_called_and_answered() -> None:
    async def calls(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
        said = renderer("tool use").encode('so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        return Completion(said, (-0.5,) * len(said), ((len(said), 0),), "stop")

    tool: Any = {"name": "add", "description": "", "input_schema": {"type": "object"}}
    async with served(calls) as (_, session, endpoint, key), anthropic_client(endpoint, key) as client:
        asked: Any = {"model": "m", "max_tokens": 50, "messages": [USER], "tools": [tool]}
        answer = await client.messages.create(**asked)
        assert [block.type for block in answer.content] == ["text", "tool_use"]
        assert answer.stop_reason == "tool_use"
        async with client.messages.stream(**asked) as stream:
            blocks = [block.model_dump() for block in (await stream.get_final_message()).content]
        assert blocks[0]["text"] == "so"
        assert blocks[1] == answer.content[1].model_dump()
        result = {"type": "tool_result", "tool_use_id": answer.content[1].model_dump()["id"], "content": "2"}
        messages = [
            USER,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(**{**asked, "messages": messages})
        assert session.tree.calls[2].parent is session.tree.calls[1]


async def test_a_refusal_of_messages_is_the_clients_own_exception() -> None:
    from anthropic import APIStatusError, BadRequestError

    async with served() as (_, session, endpoint, key), anthropic_client(endpoint, key) as client:
        asked: Any = {"model": "m", "max_tokens": 5, "messages": [USER]}
        for fields, why in (
            ({"extra_body": {"temperature": 0.5}}, "temperature = 0.5 would change"),
            ({"stop_sequences": ["x"]}, "stop"),
            ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking = .* is not supported"),
            ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "'image' is not supported"),
            ({"messages": [USER, {"role": "assistant", "content": "so"}]}, "continuing it"),
            ({"tool_choice": {"type": "any"}}, "tool_choice = 'any'"),
            ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "parallel"),
        ):
            with pytest.raises(BadRequestError, match=why):
                await client.messages.create(**{**asked, **fields})
        endpoint.end(key, "the episode is over")
        with pytest.raises(APIStatusError, match="the episode is over"):
            await client.messages.create(**asked)
        assert session.tree.calls == []


async def test_thoughts_come_apart_and_may_be_left_out_or_sent_back() -> None:
    reader = AnswerReader("hermes", "think")
    async with served(thinks, reader=reader) as (client, session, endpoint, key):
        answer = await client.chat.completions.create(model="m", messages=[USER])
        message: Any = answer.choices[0].message
        assert (message.content, message.reasoning_content) == (HELLO, "hm")
        stream: Any = await client.chat.completions.create(model="m", messages=[USER], stream=True)
        deltas = [chunk.choices[0].delta.model_dump() async for chunk in stream]
        assert [delta.get("reasoning_content") for delta in deltas if delta["content"]] == ["hm"]
        more: Any = {"role": "user", "content": "more"}
        for said in (message, {"role": "assistant", "content": HELLO}):
            await client.chat.completions.create(model="m", messages=[USER, said, more])
            assert session.tree.calls[-1].parent is session.tree.calls[1]
        edited: Any = {"role": "assistant", "content": HELLO, "reasoning_content": "other"}
        await client.chat.completions.create(model="m", messages=[USER, edited, more])
        assert session.tree.calls[-1].parent is None
        response = await client.responses.create(model="m", input="abc")
        assert [item.type for item in response.output] == ["reasoning", "message"]
        items: Any = [
            {"role": "user", "content": "abc"},
            *response.output,
            {"role": "user", "content": "more"},
        ]
        await client.responses.create(model="m", input=items)
        assert session.tree.calls[-1].parent is session.tree.calls[-2]
        async with anthropic_client(endpoint, key) as other:
            asked: Any = {"model": "m", "max_tokens": 50, "messages": [USER]}
            async with other.messages.stream(**asked) as events:
                blocks = (await events.get_final_message()).content
            assert [block.type for block in blocks] == ["thinking", "text"]
            back = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": "more"}]
            await other.messages.create(**{**asked, "messages": back})
            assert session.tree.calls[-1].parent is session.tree.calls[-2]
