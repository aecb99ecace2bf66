"""Tests that every engine must pass behind the endpoint of sessions, with the official clients."""

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import torch
from openai import AsyncOpenAI

from rollout.config import EnvironmentConfig
from rollout.engines.base import Sampling
from rollout.engines.contract.bench import MAX_MODEL_LEN, Bench
from rollout.engines.contract.models import logits_of
from rollout.engines.sampling import sampled_distribution
from rollout.sample import PromptTokens
from rollout.sessions.branches import branches_of
from rollout.sessions.model_calls import ModelCalls
from rollout.sessions.session import Session
from tests.rollout.sessions.chats import renderer
from tests.rollout.sessions.serving import served

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

USER: Any = {"role": "user", "content": "abc the"}
MORE: Any = {"role": "user", "content": "more"}
NEARLY_EQUAL = 0.05
"""Difference of two logits between which the rounding of an engine may decide."""
FUNCTION: Any = {"name": "add", "description": "", "parameters": {"type": "object"}}


class SessionContract:
    async def test_sessions_record_what_clients_of_every_api_cause(self, bench: Bench) -> None:
        from anthropic import AsyncAnthropic  # seconds of each process that collects this file

        version = (await bench.serve("A")).version
        text = renderer("tool use")
        sampling = Sampling(max_tokens=8, stop_token_ids=text.stop_token_ids)
        generate = ModelCalls(bench.engine, sampling, EnvironmentConfig(), MAX_MODEL_LEN, "session/0.{turn}")
        async with served(generate) as (client, session, endpoint, key):
            await chats(client)
            await responds(client)
            async with AsyncAnthropic(base_url=endpoint.url(key).removesuffix("/v1"), api_key=key) as other:
                await speaks(other)
            await continues_tokens(session, endpoint.url(key))
            assert {v for call in session.tree.calls for _, v in call.completion.spans} == {version}
            assert len(session.tree.calls) == 12
            assert session.restarts == 0
        if bench.computes:
            assert_recomputed(bench, session, sampling)

    async def test_context_calls_are_generated_by_their_own_parameters(self, bench: Bench) -> None:
        await bench.serve("A")
        config = EnvironmentConfig(sampling="context")
        calls = ModelCalls(bench.engine, Sampling(max_tokens=8), config, MAX_MODEL_LEN, "context/0.{turn}.t")
        async with served(calls, rules=calls.rules, generate_as=calls) as (client, session, _, _):
            async with asyncio.TaskGroup() as tasks:
                for own in ({"temperature": 0, "n": 2}, {}):
                    tasks.create_task(client.completions.create(model="m", prompt=[5, 6, 7], **own))  # type: ignore[call-overload]
        trained = [call for call in session.tree.calls if call.trained]
        greedy = [call.completion for call in session.tree.calls if call.has_own_sampling]
        assert (len(trained), len(greedy)) == (1, 2)
        if bench.computes:
            assert_recomputed(bench, session, Sampling(max_tokens=8))
            for said in (list(completion.tokens) for completion in greedy):
                logits = logits_of(bench.models["A"], [5, 6, 7], said)
                gaps = logits.max(-1).values - logits.gather(-1, torch.tensor(said)[:, None])[:, 0]
                assert float(gaps.max()) < NEARLY_EQUAL

    async def test_prefix_hits_are_counted_for_each_call_of_an_episode(self, bench: Bench) -> None:
        await bench.serve("A")
        calls = ModelCalls(
            bench.engine, Sampling(max_tokens=4), EnvironmentConfig(), MAX_MODEL_LEN, "hits/0.{turn}.t"
        )
        prompt = tuple(range(432, 4, -1))
        said = (await calls(prompt, None)).tokens
        more = (*prompt, *said, *prompt[:20])
        await calls(more, None)
        assert calls.first_prompt == PromptTokens(len(prompt), 0)
        assert calls.later_prompts.total == len(more)
        assert calls.later_prompts.cached in (range(256, len(more)) if bench.caches else (0,))


async def chats(client: AsyncOpenAI) -> None:
    """Two turns, one of them streamed, with tools and the result of one."""
    tools: Any = [{"type": "function", "function": FUNCTION}]
    for offered in ({}, {"tools": tools}):
        first = await client.chat.completions.create(model="m", messages=[USER], **offered)
        stream: Any = await client.chat.completions.create(
            model="m", messages=[USER, first.choices[0].message, MORE], stream=True, **offered
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason in ("stop", "length", "tool_calls")
    call: Any = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    called: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    result: Any = {"role": "tool", "tool_call_id": "abcdefghi", "content": "2"}
    await client.chat.completions.create(model="m", messages=[USER, called, result], tools=tools)


async def responds(client: AsyncOpenAI) -> None:
    """Two turns by name, one of them streamed, with functions."""
    tools: Any = [{"type": "function", **FUNCTION, "strict": None}]
    first = await client.responses.create(model="m", input="abc", tools=tools)
    stream: Any = await client.responses.create(
        model="m", input="more", previous_response_id=first.id, tools=tools, stream=True
    )
    *_, last = [event async for event in stream]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.previous_response_id == first.id


async def speaks(client: "AsyncAnthropic") -> None:
    """Two turns of messages, one of them streamed."""
    tools: Any = [{"name": "add", "input_schema": {"type": "object"}}]
    first = await client.messages.create(model="m", max_tokens=6, messages=[USER], tools=tools)
    said: Any = {"role": "assistant", "content": first.content}
    async with client.messages.stream(model="m", max_tokens=6, messages=[USER, said, MORE]) as stream:
        assert (await stream.get_final_message()).usage.output_tokens <= 6


async def continues_tokens(session: Session, url: str) -> None:
    """Three requests of tokens: the second continues the first, the third cuts into its answer."""
    tokens = [20, 21, 22]
    for i in range(3):
        body = {"token_ids": tokens, "sampling_params": {"max_tokens": 5, "logprobs": 1}}
        async with aiohttp.ClientSession() as http:
            async with http.post(url.removesuffix("v1") + "inference/v1/generate", json=body) as response:
                (choice,) = (await response.json())["choices"]
        recorded = session.tree.calls[-1].completion
        assert choice["token_ids"] == list(recorded.tokens)
        assert [row["logprob"] for row in choice["logprobs"]["content"]] == pytest.approx(recorded.logprobs)
        tokens = [*tokens, *choice["token_ids"], 30] if i == 0 else [20, 21, 22, 23]
    assert session.tree.calls[-2].parent is session.tree.calls[-3]
    assert session.tree.calls[-1].parent is None


def assert_recomputed(bench: Bench, session: Session, sampling: Sampling) -> None:
    """Whether each row's log-probabilities are those of the model, in one pass over all of its tokens."""
    rows: list[list[int]] = []
    for branch in branches_of(session.tree):
        before = rows[branch.parent][: branch.shared] if branch.parent >= 0 else []
        rows.append([*before, *branch.tokens])
        logits = logits_of(bench.models["A"], rows[-1][:1], rows[-1][1:])
        places = [i for i, sampled in enumerate(branch.loss_mask) if sampled]
        expected = [
            float(sampled_distribution(logits[len(before) + i - 1], sampling)[branch.tokens[i]])
            for i in places
        ]
        if places:  # the rows of context calls have none
            bench.assert_logprobs(sampling, [branch.logprobs[i] for i in places], expected)
