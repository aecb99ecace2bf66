"""Makes the content that clients get of an answer's tokens, and the key of requests that continue it."""

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
    """Content of an answer, and the beginning of requests that continue it."""

    text: str
    message: dict[str, Any]
    end: int | TextEnd
    also: int | None = None
    """As in `ModelCall`."""
    stopped_by: str = ""
    """The request's own stop string that ended it, which neither text nor message has."""


def answer_content(
    request: HarnessRequest,
    context: tuple[int, ...],
    tokens: tuple[int, ...],
    read: ReadAnswer | None,
    renderer: Renderer,
) -> AnswerContent:
    """Return what an answer says.

    Args:
        request: the one that is answered.
        context: the tokens that the answer continues.
        tokens: the answer.
        read: its parts, if the request is a dialogue.
        renderer: detokenizes.
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
    """Return a text up to the first of some strings, and that string; empty if there is none."""
    places = [(text.find(each), each) for each in stop if each in text]
    at, found = min(places, default=(len(text), ""))
    return text[:at], found


def _message(read: ReadAnswer, context: tuple[int, ...], tokens: tuple[int, ...]) -> dict[str, Any]:
    """Return the message of an answer; the ids of its calls follow from the tokens."""
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
    """Return nine letters and digits, which every template takes."""
    numbers = np.array((index, len(context), *context, *sampled), dtype=np.int64)
    return xxhash.xxh3_64_hexdigest(numbers.tobytes())[:9]
