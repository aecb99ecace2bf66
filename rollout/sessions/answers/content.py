"""Converts an answer's tokens to client-facing content, and computes the key of continuation requests."""

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from rollout.render import Renderer
from rollout.sessions.answers.reader import ReadAnswer
from rollout.sessions.calls import TextEnd, text_end
from rollout.sessions.messages import read_message
from rollout.sessions.requests import HarnessRequest


@dataclass(frozen=True, slots=True)
class AnswerContent:
    """Content of an answer, and the lookup key of requests that continue it."""

    text: str
    message: dict[str, Any]
    end: int | TextEnd
    also: int | None = None
    """`end`, `also`: as in `ModelCall`."""
    stopped_by: str = ""
    """Stop string of the request that ended the answer; removed from text and message."""


def answer_content(
    request: HarnessRequest,
    context: tuple[int, ...],
    tokens: tuple[int, ...],
    read: ReadAnswer | None,
    renderer: Renderer,
) -> AnswerContent:
    """Return the content of an answer.

    Args:
        request: the answered request.
        context: tokens before the answer.
        read: parsed parts of the answer; None for completions.
    """
    dialogue, prompt = request.dialogue, request.prompt
    stop = request.sampling.stop if request.sampling is not None else ()
    text, stopped_by = _cut(renderer.text(tokens), stop)
    if read is None or dialogue is None:
        before = prompt if isinstance(prompt, str) else renderer.text(prompt)
        message = {"role": "assistant", "content": text}
        return AnswerContent(text, message, text_end(before + text), stopped_by=stopped_by)
    read = replace(read, content=_cut(read.content, stop)[0], thoughts=_cut(read.thoughts, stop)[0])
    message = _message(read, context, tokens)
    answered = read_message(message, "answer")
    end = dialogue.answered(answered)
    if not read.thoughts:
        return AnswerContent(text, message, end, stopped_by=stopped_by)
    del answered["reasoning_content"]
    return AnswerContent(text, message, end, dialogue.answered(answered), stopped_by)


def _cut(text: str, stop: tuple[str, ...]) -> tuple[str, str]:
    """Return the text before the first stop string, and that string; empty if no stop string occurs."""
    places = [(text.find(each), each) for each in stop if each in text]
    at, found = min(places, default=(len(text), ""))
    return text[:at], found


def _message(read: ReadAnswer, context: tuple[int, ...], tokens: tuple[int, ...]) -> dict[str, Any]:
    """Return the chat message of an answer; the ids of its tool calls are derived from the tokens."""
    message: dict[str, Any] = {"role": "assistant", "content": read.content}
    if read.thoughts:
        message["reasoning_content"] = read.thoughts
    calls = [
        {
            "id": _call_id(i, context, tokens),
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(read.calls)
    ]
    return {**message, "content": read.content or None, "tool_calls": calls} if calls else message


def _call_id(index: int, context: tuple[int, ...], sampled: tuple[int, ...]) -> str:
    """Return an id of nine letters and digits, the format that every chat template accepts."""
    numbers = np.array((index, len(context), *context, *sampled), dtype=np.int64)
    return xxhash.xxh3_64_hexdigest(numbers.tobytes())[:9]
