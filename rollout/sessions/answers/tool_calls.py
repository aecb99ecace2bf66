"""Finds tool calls in the text of an answer, by the syntax that the model was taught."""

import re
from collections.abc import Callable
from typing import Any

from rollout.sessions.messages import parsed_json

Found = list[tuple[str, dict[str, Any]]]
"""(name, arguments) of each call."""

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def hermes(text: str) -> tuple[str, Found]:
    """Read JSON objects between <tool_call> tags, as Hermes and Qwen write them; the rest is content."""
    found = [call for match in _TAGGED.finditer(text) if (call := _call(match.group(1)))]
    if not found or len(found) != len(_TAGGED.findall(text)):
        return text, []
    return _TAGGED.sub("", text).strip(), found


def whole_json(text: str) -> tuple[str, Found]:
    """Read an answer that is a JSON object and nothing else, as Llama 3 writes a call."""
    call = _call(text.strip())
    return ("", [call]) if call else (text, [])


def none(text: str) -> tuple[str, Found]:
    """Find no calls: an answer is its text."""
    return text, []


PARSERS: dict[str, Callable[[str], tuple[str, Found]]] = {"hermes": hermes, "json": whole_json, "none": none}
"""Name -> function that returns the content of an answer and its calls; all calls are found or none."""


def _call(text: str) -> tuple[str, dict[str, Any]] | None:
    try:
        found = parsed_json(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return (found["name"], arguments) if isinstance(arguments, dict) else None
