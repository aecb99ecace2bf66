"""Parses tool calls from the text of an answer, in the syntax that the model was trained on."""

from collections.abc import Callable
from typing import Any

from rollout.bounded_json import parsed_json

Found = list[tuple[str, dict[str, Any]]]
"""(name, arguments) of each tool call."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def hermes(text: str) -> tuple[str, Found]:
    """Parse JSON objects between <tool_call> tags, the syntax of Hermes and Qwen; the rest is content."""
    tagged, content = _tagged(text)
    found = [call for inside in tagged if (call := _call(inside))]
    if not found or len(found) != len(tagged):
        return text, []
    return content.strip(), found


def whole_json(text: str) -> tuple[str, Found]:
    """Parse an answer that is a single JSON object, the tool call syntax of Llama 3."""
    call = _call(text.strip())
    return ("", [call]) if call else (text, [])


def none(text: str) -> tuple[str, Found]:
    """Return the answer as text, without tool calls."""
    return text, []


PARSERS: dict[str, Callable[[str], tuple[str, Found]]] = {"hermes": hermes, "json": whole_json, "none": none}
"""Syntax -> function that returns (content, tool calls) of an answer. If one call is malformed, none is
returned."""


def _tagged(text: str) -> tuple[list[str], str]:
    """Return the text between each pair of tags, and the text outside the pairs.

    Runs in linear time, unlike a regular expression with a lazy repeat: answers are parsed on the event loop,
    and a collapsed model may emit a tag followed by spaces up to the token limit.
    """
    inside, outside, end = [], [], 0
    while (start := text.find(_OPEN, end)) >= 0 and (stop := text.find(_CLOSE, start)) >= 0:
        outside.append(text[end:start])
        inside.append(text[start + len(_OPEN) : stop])
        end = stop + len(_CLOSE)
    return inside, "".join([*outside, text[end:]])


def _call(text: str) -> tuple[str, dict[str, Any]] | None:
    try:
        call = parsed_json(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return (call["name"], arguments) if isinstance(arguments, dict) else None
