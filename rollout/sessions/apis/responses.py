"""Parses requests of OpenAI's responses API into chat requests, including the earlier response they name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollout.sessions.messages import text_of
from rollout.sessions.refusal import RequestRefused, check_supported, invalid, unsupported
from rollout.sessions.requests import HarnessRequest, read_chat, with_one_answer
from rollout.sessions.sampling import SamplingRules

LOGPROBS = "message.output_text.logprobs"
"""The only supported value in `include`."""
ONLY: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "reasoning": ({},),
    "include": ([], [LOGPROBS]),
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
}
"""Field -> supported values besides null."""
TRANSLATED = (
    *ONLY,
    "text",
    "input",
    "instructions",
    "tools",
    "max_output_tokens",
    "previous_response_id",
    "store",
)
"""Fields that a chat request lacks or has in another shape. Other fields pass through unchanged or are
refused."""
TEXTS = ("input_text", "output_text", "text")
"""Types of content parts that contain text."""
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """Response that later requests may continue."""

    messages: tuple[Message, ...]
    """Chat messages of the request and its answer, without instructions."""
    body: dict[str, Any]
    """Response body as sent to the client."""


@dataclass(frozen=True, slots=True)
class ResponseFields:
    """Request fields that the response repeats."""

    messages: tuple[Message, ...]
    """Chat messages of the request, without instructions and without the answer."""
    store: bool
    fields: Mapping[str, Any]


def read_responses(
    body: Any, *, rules: SamplingRules, stored: Mapping[str, StoredResponse]
) -> HarnessRequest:
    """Parse the body of a responses request.

    Args:
        body: parsed JSON.
        rules: see `read_chat`.
        stored: responses of the session, by name.

    Raises:
        RequestRefused: `read_chat` refuses the request, or the previous response is unknown.
    """
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    for name, supported in ONLY.items():
        check_supported(name, body.get(name), supported)
    instructions = body.get("instructions")
    if not isinstance(instructions, str | None):
        raise invalid("instructions must be text", "instructions")
    store = body.get("store", True)
    before = _earlier(body.get("previous_response_id"), stored)
    messages = (*before, *_messages(body.get("input")))
    if not messages:
        raise invalid("input must be text or a list of at least one item", "input")
    chat = {name: value for name, value in body.items() if name not in TRANSLATED}
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat |= {
        "messages": [*system, *messages],
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(_listed(body.get("tools"), "tools"))],
        "tool_choice": body.get("tool_choice"),
        "response_format": _format(body.get("text")),
        "max_tokens": body.get("max_output_tokens"),
        "logprobs": body.get("include") == [LOGPROBS],
    }
    fields = {
        "instructions": instructions,
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "previous_response_id": body.get("previous_response_id"),
        "store": store is not False,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
    }
    response = ResponseFields(messages, store is not False, fields)
    return replace(with_one_answer(read_chat(chat, rules=rules)), response=response)


def _format(text: Any) -> Any:
    """Return the `response_format` of the equivalent chat request."""
    if text is not None and not (isinstance(text, dict) and set(text) <= {"format"}):
        raise unsupported("text", text, "its format")
    return (text or {}).get("format")


def _earlier(name: Any, stored: Mapping[str, StoredResponse]) -> tuple[Message, ...]:
    if name is None:
        return ()
    if not isinstance(name, str) or name not in stored:
        raise RequestRefused(
            400,
            "previous_response_not_found",
            f"the session has no stored response {str(name)[:80]!r}",
            "previous_response_id",
        )
    return stored[name].messages


def _messages(value: Any) -> Iterator[Message]:
    """Yield the chat messages of the input; consecutive reasoning, text and call items form one answer."""
    if isinstance(value, str):
        yield {"role": "user", "content": value}
        return
    answer: Message = {}
    for i, item in enumerate(_listed(value, "input")):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        if kind == "function_call" or kind == "reasoning" or item.get("role") == "assistant":
            part = _answer_part(kind, item, where)
            if kind != "function_call" and _follows(answer, part):
                yield answer
                answer = {}
            calls = [*answer.get("tool_calls", []), *part.pop("tool_calls", [])]
            answer = {"role": "assistant", "content": None, **answer, **part, "tool_calls": calls}
            continue
        if answer:
            yield answer
            answer = {}
        if kind == "function_call_output":
            content = text_of(item.get("output"), f"{where}.output", TEXTS)
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        elif kind == "message":
            content = text_of(item.get("content"), f"{where}.content", TEXTS)
            yield {"role": item.get("role"), "content": content}
        else:
            raise invalid(f"{where} of type {kind!r} is not supported", where, "unsupported_value")
    if answer:
        yield answer


def _follows(answer: Message, part: Message) -> bool:
    """Return whether a part starts another answer: it follows tool calls, or repeats a part of the answer."""
    return bool(answer.get("tool_calls")) or any(answer.get(field) is not None for field in part)


def _answer_part(kind: Any, item: Mapping[str, Any], where: str) -> Message:
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        return {"tool_calls": [{"id": item.get("call_id"), "type": "function", "function": function}]}
    if kind == "reasoning":
        if item.get("encrypted_content"):
            raise invalid(f"{where}.encrypted_content is not supported", where, "unsupported_value")
        parts = [*_listed(item.get("summary"), where), *_listed(item.get("content"), where)]
        return {"reasoning_content": "".join(str(part.get("text", "")) for part in parts)}
    if kind != "message":
        raise invalid(f"{where} of type {kind!r} is not supported", where, "unsupported_value")
    return {"content": text_of(item.get("content"), f"{where}.content", TEXTS)}


def _tool(tool: Mapping[str, Any], where: str) -> Message:
    if tool.get("type") != "function":
        raise invalid(f"{where} of type {tool.get('type')!r} is not supported, only function", where)
    function = {"name": tool.get("name"), "description": tool.get("description") or ""}
    return {"type": "function", "function": {**function, "parameters": tool.get("parameters") or {}}}


def _listed(values: Any, where: str) -> list[dict[str, Any]]:
    if values is None:
        return []
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise invalid(f"{where} must be text or a list of objects", where)
    return values
