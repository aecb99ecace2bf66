"""Validates the messages of a chat request, and hashes message prefixes to compare requests."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from rollout.bounded_json import parsed_json
from rollout.sessions.refusal import RequestRefused, invalid

Message = dict[str, Any]
"""Message in chat template form: `content` is text, tool call arguments are parsed."""

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Role in a request -> role in chat templates."""
TEXTS = ("name", "tool_call_id", "reasoning_content")
"""Text fields that templates may read, besides `content`."""
REPEATED = ("refusal", "annotations", "audio", "function_call")
"""Fields of an answer that clients send back empty."""
MAX_MESSAGES = 10_000


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The M messages of a request, and its tools."""

    messages: tuple[Message, ...]
    """[M]."""
    tools: tuple[dict[str, Any], ...]
    keys: tuple[int, ...]
    """[M + 1]: entry i is the hash of the tools and the first i messages."""

    def answered(self, answer: Message) -> int:
        """Return the key of the dialogue extended by an answer."""
        return chained(self.keys[-1], answer)


def read_dialogue(messages: Any, tools: Any) -> Dialogue:
    """Validate the messages and tools of a request.

    Raises:
        RequestRefused: a message or tool is malformed or contains non-text content; the message names it.
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
    """Return the key of a dialogue extended by a message, from the key of the dialogue."""
    texts = [str(key)]
    for name in sorted(message):
        value = message[name]
        text = value if isinstance(value, str) else _canonical(value)
        # kind and length distinguish messages whose joined texts are equal
        texts.append(f"{name} {isinstance(value, str):d} {len(text)} {text}")
    return xxhash.xxh3_128_intdigest(" ".join(texts).encode("utf-8", "surrogatepass"))


def read_message(message: Any, where: str) -> Message:
    """Return a message of a request in chat template form.

    Args:
        where: path of the message, for errors.

    Raises:
        RequestRefused: the message is malformed or contains non-text content.
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
    """Return the text of a content field: a string, a list of parts, or None.

    Args:
        content: field of a request.
        where: path of the field, for errors.
        types: part types that contain text.

    Raises:
        RequestRefused: a part is not text, or `content` is not a list.
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
    """Return tool call arguments in chat template form: parsed if a JSON object, else unchanged."""
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
    """Return JSON with sorted keys."""
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=True)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, "invalid_value", f"the request cannot be compared: {error}") from None
