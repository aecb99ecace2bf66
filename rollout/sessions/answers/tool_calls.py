"""Finds tool calls in the text of an answer, by the syntax that the model was taught."""

from collections.abc import Callable
from typing import Any

from rollout.bounded_json import parsed_json

Found = list[tuple[str, dict[str, Any]]]
"""(name, arguments) of each call."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


def hermes(text: str) -> tuple[str, Found]:
    """Read JSON objects between <tool_call> tags, as Hermes and Qwen write them; the rest is content."""
    tagged, content = _tagged(text)
    found = [call for inside in tagged if (call := _call(inside))]
    if not found or len(found) != len(tagged):
        return text, []
    return content.strip(), found


def whole_json(text: str) -> tuple[str, Found]:
    """Read an answer that consists of one JSON object, as Llama 3 writes a call."""
    call = _call(text.strip())
    return ("", [call]) if call else (text, [])


def none(text: str) -> tuple[str, Found]:
    """Find no calls: an answer is its text."""
    return text, []


PARSERS: dict[str, Callable[[str], tuple[str, Found]]] = {"hermes": hermes, "json": whole_json, "none": none}
"""Name -> function that returns the content of an answer and its calls; all calls are found or none."""


def _tagged(text: str) -> tuple[list[str], str]:
    """Return the text between each pair of tags, and the text without the pairs.

    It takes linear time, as an expression with a lazy repeat does not: answers are read on the event loop,
    and a model that has collapsed writes a tag and then spaces up to its limit.
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
