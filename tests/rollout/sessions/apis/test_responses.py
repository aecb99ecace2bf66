"""The responses API, as the `openai` package speaks it."""

import json
from typing import Any

import openai
import pytest

from rollout.sessions.apis.responses import read_responses
from rollout.sessions.branches import branches_of
from rollout.sessions.sampling import SamplingRules
from tests.rollout.sessions.chats import renderer
from tests.rollout.sessions.serving import HELLO, calls, served

TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}


async def test_a_response_is_continued_by_name_and_by_its_output() -> None:
    async with served() as (client, session, _, _):
        first = await client.responses.create(model="m", input="abc", instructions="be brief")
        assert (first.output_text, first.status, first.instructions) == (HELLO, "completed", "be brief")
        assert first.usage is not None
        assert first.usage.output_tokens == len(renderer("tool use").encode(HELLO))
        named = await client.responses.create(
            model="m", input="more", instructions="be brief", previous_response_id=first.id
        )
        assert session.tree.calls[1].parent is session.tree.calls[0]
        repeated: Any = [{"role": "user", "content": "abc"}, *first.output, {"role": "user", "content": "x"}]
        await client.responses.create(model="m", input=repeated, instructions="be brief")
        assert session.tree.calls[2].parent is session.tree.calls[0]
        await client.responses.create(model="m", input="more", previous_response_id=named.id)
        assert session.tree.calls[3].parent is None, "other instructions are another history"
        rows = branches_of(session.tree)
        assert sum(sum(row.loss_mask) for row in rows) == 4 * first.usage.output_tokens


async def test_stored_responses_share_the_messages_that_they_repeat() -> None:
    async with served() as (client, session, _, _):
        said: Any = [{"role": "user", "content": "abc"}]
        for number in range(3):
            answer = await client.responses.create(
                model="m", input=said, tools=[TOOL], instructions="be brief"
            )
            said += [*answer.output, {"role": "user", "content": f"more {number}"}]
        _, second, third = session.stored.values()
        assert len(third.messages) == 6
        assert all(a is b for a, b in zip(second.messages[:3], third.messages, strict=False))
        assert second.body["tools"] is third.body["tools"]


async def test_a_streamed_response_ends_as_a_plain_one() -> None:
    async with served() as (client, session, _, _):
        plain = await client.responses.create(
            model="m", input="abc", include=["message.output_text.logprobs"]
        )
        async with client.responses.stream(
            model="m", input="abc", include=["message.output_text.logprobs"]
        ) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == HELLO
        assert (final.output_text, final.usage) == (plain.output_text, plain.usage)
        cut: Any = await client.responses.create(model="m", input="abc", max_output_tokens=2, stream=True)
        *_, last = [event async for event in cut]
        assert last.type == "response.incomplete"
        assert last.response.incomplete_details.reason == "max_output_tokens"
        said: Any = plain.output[0]
        assert [entry.logprob for entry in said.content[0].logprobs] == list(
            session.tree.calls[0].completion.logprobs
        )
        await client.responses.create(model="m", input="more", previous_response_id=final.id)
        assert session.tree.calls[3].parent is session.tree.calls[1]


async def test_functions_are_called_and_their_outputs_continue() -> None:
    async with served(calls) as (client, session, _, _):
        answer = await client.responses.create(model="m", input="abc", tools=[TOOL])
        message, call = answer.output
        assert (message.type, call.type, answer.output_text) == ("message", "function_call", "so")
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        await client.responses.create(model="m", input=[result], previous_response_id=answer.id, tools=[TOOL])
        repeated: Any = [{"role": "user", "content": "abc"}, *answer.output, result]
        stream: Any = await client.responses.create(model="m", input=repeated, tools=[TOOL], stream=True)
        done = [event async for event in stream][-1]
        assert [item.type for item in done.response.output] == ["message", "function_call"]
        assert [call.parent for call in session.tree.calls[1:]] == [session.tree.calls[0]] * 2
        assert session.tree.calls[1].inserted == session.tree.calls[2].inserted


async def test_a_response_is_kept_while_its_request_and_the_session_want_it() -> None:
    async with served() as (client, _, endpoint, key):
        kept = await client.responses.create(model="m", input="abc")
        passing = await client.responses.create(model="m", input="abc", store=False)
        assert (await client.responses.retrieve(kept.id)).output_text == HELLO
        with pytest.raises(openai.NotFoundError, match=passing.id):
            await client.responses.retrieve(passing.id)
        await client.responses.delete(kept.id)
        for name in (kept.id, passing.id, "resp_guess"):
            with pytest.raises(openai.BadRequestError, match=name) as refused:
                await client.responses.create(model="m", input="more", previous_response_id=name)
            assert refused.value.code == "previous_response_not_found"
        endpoint.end(key, "the episode is over")
        with pytest.raises(openai.APIStatusError, match="the episode is over"):
            await client.responses.retrieve(kept.id)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"input": []}, "input must be"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "'item_reference' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' is not supported"),
        ({"text": {"format": {"type": "json_object"}}}, "json_object"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"temperature": 0.5}, r"\[sampling\] decides"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation is not known"),
        ({"instructions": ["x"]}, "instructions must be text"),
    ],
)
async def test_unsupported_field_is_refused_by_name(fields: dict[str, Any], why: str) -> None:
    async with served() as (client, session, _, _):
        with pytest.raises(openai.BadRequestError, match=why):
            await client.responses.create(**{"model": "m", "input": "abc", **fields})
        assert session.tree.calls == []


def test_thoughts_text_and_calls_in_a_row_are_one_answer() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    thoughts = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    items = [
        {"role": "user", "content": "abc"}, thoughts, {"role": "assistant", "content": "so"}, call, call,
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "2"}]},
        {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"},
    ]  # fmt: skip
    asked = read_responses({"input": items}, rules=SamplingRules(), stored={})
    assert asked.dialogue is not None
    user, answer, result, *others = asked.dialogue.messages
    assert (user["role"], answer["content"], answer["reasoning_content"]) == ("user", "so", "hm")
    assert len(answer["tool_calls"]) == 2
    assert (result["role"], result["content"]) == ("tool", "2")
    assert [message["content"] for message in others] == ["a", "b"]
