"""Requests that are as much work as one can be, for every API of the endpoint."""

import json
from collections.abc import Callable
from typing import Any

CHAT, TEXT, RESPONSES = "v1/chat/completions", "v1/completions", "v1/responses"
MESSAGES, GENERATE, RESULT = "v1/messages", "inference/v1/generate", "v1/results/name"
USER = {"role": "user", "content": "abc"}

HOSTILE: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "a long message": (CHAT, lambda n: _chat([{"role": "user", "content": "a1 " * (n // 3)}])),
    "a long message of escapes": (CHAT, lambda n: _chat([{"role": "user", "content": "\n" * (n // 2)}])),
    "a long result of a tool": (CHAT, lambda n: _chat([USER, {"role": "tool", "content": "z" * n}])),
    "a long role": (CHAT, lambda n: _chat([{"role": "r" * n, "content": ""}])),
    "a long model": (CHAT, lambda n: _chat([USER], model="m" * n)),
    "a long field": (CHAT, lambda n: _chat([USER], **{"f" * n: 1})),
    "many messages": (CHAT, lambda n: _chat([USER] * (n // 100))),
    "as many messages as may be": (CHAT, lambda n: _chat([USER] * 10_000)),
    "many tools": (CHAT, lambda n: _chat([USER], tools=[_tool(i) for i in range(n // 100)])),
    "some thousand tools": (CHAT, lambda n: _chat([USER], tools=[_tool(i) for i in range(9_000)])),
    "long arguments of a call": (CHAT, lambda n: _chat([USER, _called("[" + "[]," * (n // 3) + "1]"), USER])),
    "many calls": (CHAT, lambda n: _chat([USER, _called(*["{}"] * (n // 100)), USER])),
    "many lists": (CHAT, lambda n: b"[" + b"[]," * (n // 3) + b"1]"),
    "deep lists": (CHAT, lambda n: b"[" * n),
    "deep lists in a tool": (CHAT, lambda n: _chat([USER], tools=[_deep(400)])),
    "broken text": (CHAT, lambda n: b"\xff" * n),
    "half a pair": (CHAT, lambda n: b'{"messages": "' + b"x" * n + b'\\ud800"}'),
    "a long prompt": (TEXT, lambda n: _json(prompt="a1 " * (n // 3))),
    "a prompt of many tokens": (TEXT, lambda n: _json(prompt=[7] * (n // 10))),
    "long instructions": (RESPONSES, lambda n: _json(input="x", instructions="i" * n)),
    "many items": (RESPONSES, lambda n: _json(input=[USER] * (n // 100))),
    "many blocks": (MESSAGES, lambda n: _chat([_blocks(n // 100)], max_tokens=5)),
    "a long system message": (MESSAGES, lambda n: _chat([USER], max_tokens=5, system="s" * n)),
    "many tokens": (GENERATE, lambda n: _json(token_ids=[7] * (n // 10), sampling_params={})),
    "a long request id": (GENERATE, lambda n: _json(token_ids=[7], sampling_params={}, request_id="n" * n)),
    "a long result": (RESULT, lambda n: json.dumps("\n" * (n // 2)).encode()),
    "a result of many values": (RESULT, lambda n: json.dumps([[]] * (n // 4)).encode()),
    "an answer with log-probabilities": (CHAT, lambda n: _chat([USER], logprobs=True)),
    "a stream of them": (CHAT, lambda n: _chat([USER], logprobs=True, stream=True)),
    "tokens with log-probabilities": (
        GENERATE, lambda n: _json(token_ids=[7], sampling_params={"logprobs": 1}),
    ),
}  # fmt: skip
"""What it is -> its path and its body, of about as many bytes."""


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _chat(messages: list[Any], **fields: Any) -> bytes:
    return _json(messages=messages, **fields)


def _tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"t{number}", "parameters": {}}}


def _deep(levels: int) -> dict[str, Any]:
    inside: Any = {}
    for _ in range(levels):
        inside = [inside]
    return {"type": "function", "function": {"name": "deep", "parameters": inside}}


def _called(*arguments: str) -> dict[str, Any]:
    calls = [
        {"id": str(i), "type": "function", "function": {"name": "f", "arguments": text}}
        for i, text in enumerate(arguments)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _blocks(count: int) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "b"}] * count}
