"""Reads the messages of a chat request, and hashes them, so that requests are compared message by message."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from rollout.bounded_json import parsed_json
from rollout.sessions.refusal import RequestRefused, invalid

Message = dict[str, Any]
"""A message as chat templates take it: `content` is text, arguments of tool calls are parsed."""

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Role in a request -> role for chat templates."""
TEXTS = ("name", "tool_call_id", "reasoning_content")
"""Fields with text that templates may use, besides `content`."""
REPEATED = ("refusal", "annotations", "audio", "function_call")
"""Fields of an answer that clients send back without content."""
MAX_MESSAGES = 10_000


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The messages of a request, M of them, and its tools."""

    messages: tuple[Message, ...]
    """[M]."""
    tools: tuple[dict[str, Any], ...]
    keys: tuple[int, ...]
    """[M + 1]: entry i is a hash of the tools and the first i messages."""

    def answered(self, answer: Message) -> int:
        """Return the key behind an answer to the request."""
        return chained(self.keys[-1], answer)


def read_dialogue(messages: Any, tools: Any) -> Dialogue:
    """Check the messages and tools of a request.

    Raises:
        RequestRefused: one is malformed, or has something else than text; names it.
    """
    if not isinstance(messages, list) or not messages:
        raise invalid("messages must be a list of at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise invalid(f"messages has {len(messages)} entries, over {MAX_MESSAGES}", "messages")
    read = tuple(read_message(message, f"messages[{i}]") for i, message in enumerate(messages))
    offered = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(_list(tools, "tools")))
    keys = [xxhash.xxh3_128_intdigest(_canonical(offered).encode())]
    for message in read:
        keys.append(chained(keys[-1], message))
    return Dialogue(read, offered, tuple(keys))


def chained(key: int, message: Message) -> int:
    """Return the key behind a message, of the key before it."""
    texts = [str(key)]
    for name in sorted(message):
        value = message[name]
        text = value if isinstance(value, str) else _canonical(value)
        # kind and length keep two messages apart whose texts are alike when they are joined
        texts.append(f"{name} {isinstance(value, str):d} {len(text)} {text}")
    return xxhash.xxh3_128_intdigest(" ".join(texts).encode("utf-8", "surrogatepass"))


def read_message(message: Any, where: str) -> Message:
    """Return a message of a request as chat templates take it.

    Raises:
        RequestRefused: it is malformed, or has something else than text; names it as `where`.
    """
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role is {role!r}, not one of {', '.join(ROLES)}", f"{where}.role")
    read: Message = {"role": ROLES[role], "content": text_of(message.get("content"), f"{where}.content")}
    for field, value in message.items():
        if field in ("role", "content") or value in (None, "", []):
            continue
        if field == "tool_calls" and role == "assistant":
            read["tool_calls"] = [
                _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(_list(value, where))
            ]
        elif field in TEXTS and isinstance(value, str):
            read[field] = value
        else:
            known = field in (*TEXTS, *REPEATED, "tool_calls")
            problem = "is not supported with this value" if known else "is not known"
            raise invalid(f"{where}.{field} {problem}", f"{where}.{field}", "unsupported_value")
    return read


def text_of(content: Any, where: str, types: Sequence[str] = ("text",)) -> str:
    """Return text that is given as a string, as parts, or not at all.

    Args:
        content: from a request.
        where: its name, in a refusal.
        types: of parts that are text.

    Raises:
        RequestRefused: it has another part, or is no list.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") in types else None
        for part in _list(content, where)
    ]
    if not all(isinstance(text, str) for text in texts):
        raise invalid(f"{where} has a part that is not text; only text is supported", where)
    return "".join(text for text in texts if text is not None)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where} is not a call of a function", where)
    called = {"name": function["name"], "arguments": parsed_arguments(function.get("arguments"))}
    found: dict[str, Any] = {"type": "function", "function": called}
    return {**found, "id": call["id"]} if isinstance(call.get("id"), str) else found


def parsed_arguments(arguments: Any) -> Any:
    """Return the arguments of a tool call as templates take them: an object, or text that is none."""
    if isinstance(arguments, str):
        try:
            parsed = parsed_json(arguments)
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return {} if arguments is None else arguments


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if tool is None or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{where} is not a function with a name", where)
    found: dict[str, Any] = tool
    return found


def _list(values: Any, where: str) -> Sequence[Any]:
    if values is None:
        return ()
    if not isinstance(values, list):
        raise invalid(f"{where} must be a list", where)
    return values


def _canonical(value: Sequence[Any]) -> str:
    """Return the text of tools or of calls, with sorted keys."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=True)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, "invalid_value", f"the request cannot be compared: {error}") from None
