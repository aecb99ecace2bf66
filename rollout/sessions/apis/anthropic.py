"""Translates Anthropic's messages API into chat requests, and answers and errors back."""

import json
from collections.abc import Iterator
from typing import Any

from rollout.render import Renderer
from rollout.sessions.bodies import usage
from rollout.sessions.messages import text_of
from rollout.sessions.refusal import RequestRefused, check_supported, invalid
from rollout.sessions.requests import HarnessRequest, read_chat, with_one_answer
from rollout.sessions.sampling import SamplingRules
from rollout.sessions.session import CallAnswer

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""HTTP status -> error type; other statuses are `api_error`."""
TRANSLATED = ("messages", "system", "tools", "tool_choice", "stop_sequences", "thinking")
"""Fields with another name or shape in a chat request. Other fields pass through unchanged or are refused."""


def read_messages(body: Any, *, rules: SamplingRules) -> HarnessRequest:
    """Parse the body of a messages request; arguments and errors: see `read_chat`."""
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise invalid("messages must be a list of messages", "messages")
    if body.get("max_tokens") is None:
        raise invalid("max_tokens is required", "max_tokens")
    check_supported("thinking", body.get("thinking"), [{"type": "disabled"}])
    chat = {name: value for name, value in body.items() if name not in TRANSLATED}
    system = text_of(body.get("system"), "system")
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for i, message in enumerate(body["messages"]):
        chat["messages"] += _messages(message, f"messages[{i}]")
    if chat["messages"] and chat["messages"][-1]["role"] == "assistant":
        raise invalid("the last message is the assistant's, and continuing it is not supported", "messages")
    if body.get("tools"):
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(_blocks(body["tools"], "tools"))]
    choice = body.get("tool_choice") or {}
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        raise invalid(
            "tool_choice.disable_parallel_tool_use is not supported", "tool_choice", "unsupported_value"
        )
    chat["tool_choice"] = choice.get("type") if isinstance(choice, dict) else choice
    chat["stop"] = body.get("stop_sequences") or []
    return with_one_answer(read_chat(chat, rules=rules))


def message_body(
    request: HarnessRequest, answer: CallAnswer, renderer: Renderer, name: str
) -> dict[str, Any]:
    """Return the response body of a messages request; `name` is its id."""
    return {
        **_head(request, name, answer.prompt_tokens),
        "content": _content(answer),
        **_stopped(answer),
        "usage": _usage(answer),
    }


def message_events(
    request: HarnessRequest, answer: CallAnswer, renderer: Renderer, name: str
) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer."""
    yield {"type": "message_start", "message": _head(request, name, answer.prompt_tokens)}
    for index, block in enumerate(_content(answer)):
        if block["type"] == "text":
            delta = {"type": "text_delta", "text": block["text"]}
            empty = {**block, "text": ""}
        elif block["type"] == "thinking":
            delta = {"type": "thinking_delta", "thinking": block["thinking"]}
            empty = {**block, "thinking": ""}
        else:
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            empty = {**block, "input": {}}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    yield {"type": "message_delta", "delta": _stopped(answer), "usage": _usage(answer)}
    yield {"type": "message_stop"}


def error_body(refusal: RequestRefused) -> dict[str, Any]:
    """Return a refusal in the error format of this API."""
    kind = ERRORS.get(refusal.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


def _head(request: HarnessRequest, name: str, prompt_tokens: int) -> dict[str, Any]:
    """Return the response body before any token is generated."""
    return {
        "id": name,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
    }


def _stopped(answer: CallAnswer) -> dict[str, Any]:
    """Return the stop reason fields of an answer."""
    reason = "stop_sequence" if answer.stopped_by else STOP_REASONS[answer.finish_reason]
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by or None}


def _usage(answer: CallAnswer) -> dict[str, int]:
    counted = usage(answer)
    return {"input_tokens": counted["prompt_tokens"], "output_tokens": counted["completion_tokens"]}


def _content(answer: CallAnswer) -> list[dict[str, Any]]:
    text = answer.message["content"]
    thoughts = answer.message.get("reasoning_content")
    blocks: list[dict[str, Any]] = (
        [{"type": "thinking", "thinking": thoughts, "signature": ""}] if thoughts else []
    )
    blocks += [{"type": "text", "text": text}] if text else []
    for call in answer.message.get("tool_calls", []):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


def _messages(message: Any, where: str) -> list[dict[str, Any]]:
    """Return the chat messages of one message; tool results become separate messages."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise invalid(f"{where} must have the role user or assistant", where)
    role = message["role"]
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(_as_blocks(message.get("content"), f"{where}.content")):
        kind = block.get("type")
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_result" and role == "user":
            content = text_of(block.get("content"), f"{where}.content[{i}].content")
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            raise invalid(f"{where}.content[{i}] of type {kind!r} is not supported", f"{where}.content[{i}]")
    if texts or calls or not messages:
        more = {"tool_calls": calls, "reasoning_content": "".join(thoughts)}
        messages.append({"role": role, "content": "".join(texts), **more})
    return messages


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise invalid(f"{where} of type {tool['type']!r} is not supported", where)
    function = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema", {})}}


def _as_blocks(content: Any, where: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else _blocks(content, where)


def _blocks(values: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise invalid(f"{where} must be a list of objects", where)
    return values
