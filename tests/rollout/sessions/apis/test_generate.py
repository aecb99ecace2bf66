"""Tokens in and out, as clients of vLLM's `/inference/v1/generate` ask for them."""

from typing import Any

import aiohttp
import msgspec
import pytest

from rollout.engines.base import Completion
from rollout.sessions.branches import branches_of
from rollout.sessions.endpoint import SessionEndpoint
from tests.rollout.sessions.serving import USER, served


async def counts(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
    """Answers with the number of its calls' tokens, under two versions."""
    said = tuple(200 + len(tokens) + i for i in range(4))[: max_tokens or None]
    return Completion(said, tuple(-0.5 - i for i in range(len(said))), ((1, 3), (len(said), 4)), "stop")


async def generated(endpoint: SessionEndpoint, key: str, tokens: list[int], **fields: Any) -> dict[str, Any]:
    body = {"token_ids": tokens, "sampling_params": {"logprobs": 1, "max_tokens": 4}, **fields}
    url = endpoint.url(key).removesuffix("/v1") + "/inference/v1/generate"
    async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
        found: dict[str, Any] = {"status": response.status, "text": await response.text()}
        return {**found, **(await response.json() if response.content_type == "application/json" else {})}


async def test_an_answer_has_tokens_logprobs_and_versions() -> None:
    async with served(counts) as (_, session, endpoint, key):
        answer = await generated(endpoint, key, [20, 21], request_id="mine", return_token_ids=True)
        (choice,) = answer["choices"]
        assert (answer["request_id"], answer["prompt_token_ids"]) == ("mine", [20, 21])
        assert choice["token_ids"] == list(session.tree.calls[0].completion.tokens) == [202, 203, 204, 205]
        assert [row["logprob"] for row in choice["logprobs"]["content"]] == [-0.5, -1.5, -2.5, -3.5]
        assert [row["token_id"] for row in choice["logprobs"]["content"]] == choice["token_ids"]
        assert choice["weight_versions"] == [
            {"version": "3", "start": 0, "end": 1},
            {"version": "4", "start": 1, "end": 4},
        ]
        assert answer["usage"]["total_tokens"] == 6
        streamed = await generated(endpoint, key, [20], stream=True, stream_options={"include_usage": True})
        events = [line.removeprefix("data: ") for line in streamed["text"].split("\n\n") if line]
        first, last = (msgspec.json.decode(event) for event in events[:2])
        assert first["choices"][0]["token_ids"] == [201, 202, 203, 204]
        assert (last["choices"], last["usage"]["completion_tokens"], events[2]) == ([], 4, "[DONE]")
        worded = await generated(endpoint, key, [20], output_mode="text")
        assert worded["choices"][0]["text"] == session.renderer.text((201, 202, 203, 204))


async def test_tokens_decide_what_a_request_continues() -> None:
    async with served(counts) as (client, session, endpoint, key):
        first = (await generated(endpoint, key, [20, 21]))["choices"][0]["token_ids"]
        await generated(endpoint, key, [20, 21, *first, 30])
        second = session.tree.calls[1]
        assert (second.parent, second.inserted) == (session.tree.calls[0], (30,))
        await generated(endpoint, key, [20, 21, *first, 30, *second.completion.tokens])
        assert (session.tree.calls[2].parent, session.tree.calls[2].inserted) == (second, ())
        await generated(endpoint, key, [20, 21, *first[:2], 40])
        assert session.tree.calls[3].parent is None
        trunk, cut = branches_of(session.tree)
        assert (cut.parent, cut.shared, cut.tokens[0]) == (0, 4, 40)
        assert sum(trunk.loss_mask) == 12
        await client.chat.completions.create(model="m", messages=[USER])
        spoken = session.tree.calls[4]
        await generated(endpoint, key, [*spoken.tokens(), 50])
        assert session.tree.calls[5].parent is spoken


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"token_ids": []}, "token_ids must be"),
        ({"token_ids": ["a"]}, "token_ids must be"),
        ({"sampling_params": None}, "sampling_params must be an object"),
        ({"sampling_params": {"temperature": 0.1}}, "[sampling] decides"),
        ({"sampling_params": {"stop": ["x"]}}, 'stop = ["x"] would change'),
        ({"sampling_params": {"n": 2}}, "n = 2 would change"),
        ({"sampling_params": {"logprobs": 5}}, "sampling_params.logprobs"),
        ({"features": {}}, "features is not known"),
        ({"output_mode": "audio"}, "output_mode"),
    ],
)
async def test_a_refusal_has_the_shape_of_vllm(fields: dict[str, Any], why: str) -> None:
    async with served(counts) as (_, session, endpoint, key):
        answer = await generated(endpoint, key, [20], **fields)
        assert (answer["status"], answer["error"]["code"]) == (400, 400)
        assert why in answer["error"]["message"]
        assert session.tree.calls == []
