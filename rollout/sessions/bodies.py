"""Formats answers for the OpenAI API, as one body or as stream events."""

import time
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from rollout.render import Renderer
from rollout.sessions.requests import HarnessRequest
from rollout.sessions.session import CallAnswer

CHUNK = "chat.completion.chunk"


def chat_body(request: HarnessRequest, answer: CallAnswer, renderer: Renderer, name: str) -> dict[str, Any]:
    """Return the response body of a chat request; `name` is its id."""
    return {
        **_head(request, name, "chat.completion", answer),
        "choices": [
            {
                "index": index,
                "message": {**each.message, "refusal": None},
                "finish_reason": each.finish_reason,
                "logprobs": chat_logprobs(each, renderer) if request.logprobs else None,
            }
            for index, each in enumerate((answer, *answer.others))
        ],
        "usage": usage(answer),
    }


def text_body(request: HarnessRequest, answer: CallAnswer, renderer: Renderer, name: str) -> dict[str, Any]:
    """Return the response body of a completion request."""
    return {
        **_head(request, name, "text_completion", answer),
        "choices": _text_choices(request, answer, renderer),
        "usage": usage(answer),
    }


def chat_start(request: HarnessRequest, name: str) -> dict[str, Any]:
    """Return the first event of a streamed chat answer, sent before the answer is generated."""
    return _head(request, name, CHUNK) | _choice_of({"role": "assistant", "content": ""}, None)


def chat_events(
    request: HarnessRequest, answer: CallAnswer, renderer: Renderer, name: str
) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed chat answer after the first event."""
    head = _head(request, name, CHUNK, answer)
    for index, each in enumerate((answer, *answer.others)):
        delta: dict[str, Any] = {"role": "assistant"} if index else {}
        delta["content"] = each.message["content"]
        if thoughts := each.message.get("reasoning_content"):
            delta["reasoning_content"] = thoughts
        if calls := each.message.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        event = head | _choice_of(delta, None, index)
        if request.logprobs:
            event["choices"][0]["logprobs"] = chat_logprobs(each, renderer)
        yield event
        yield head | _choice_of({}, each.finish_reason, index)
    if request.include_usage:
        yield {**head, "choices": [], "usage": usage(answer)}


def text_events(
    request: HarnessRequest, answer: CallAnswer, renderer: Renderer, name: str
) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed completion."""
    head = _head(request, name, "text_completion", answer)
    yield {**head, "choices": _text_choices(request, answer, renderer)}
    if request.include_usage:
        yield {**head, "choices": [], "usage": usage(answer)}


def usage(answer: CallAnswer) -> dict[str, int]:
    """Return the token usage over all answers to a request; the whole context counts as prompt, once."""
    sampled = sum(len(each.call.completion.tokens) for each in (answer, *answer.others))
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.prompt_tokens + sampled,
    }


def versions_of(answer: CallAnswer) -> str | None:
    """Return the weight versions that sampled the answers, such as v3 or v3-v4; None if unknown."""
    completions = (each.call.completion for each in (answer, *answer.others))
    versions = {version for completion in completions for _, version in completion.spans}
    first, last = min(versions, default=-1), max(versions, default=-1)
    if last < 0:
        return None
    return f"v{last}" if first == last else f"v{first}-v{last}"


def _head(request: HarnessRequest, name: str, kind: str, answer: CallAnswer | None = None) -> dict[str, Any]:
    """Return the fields common to all bodies; `answer` None: not generated yet."""
    return {
        "id": name,
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": answer and versions_of(answer),
    }


def _choice_of(delta: dict[str, Any], reason: str | None, index: int = 0) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}]}


def _text_choices(request: HarnessRequest, answer: CallAnswer, renderer: Renderer) -> list[dict[str, Any]]:
    answers = enumerate((answer, *answer.others))
    return [{**_text_choice(request, each, renderer), "index": index} for index, each in answers]


def _text_choice(request: HarnessRequest, answer: CallAnswer, renderer: Renderer) -> dict[str, Any]:
    completion = answer.call.completion
    logprobs = None
    if request.logprobs:
        pieces = [renderer.piece(token) for token in completion.tokens]
        offsets = list(accumulate(map(len, pieces[:-1]), initial=0))
        logprobs = {
            "tokens": pieces,
            "token_logprobs": list(completion.logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }
    return {"text": answer.text, "finish_reason": answer.finish_reason, "logprobs": logprobs}


def chat_logprobs(answer: CallAnswer, renderer: Renderer) -> dict[str, Any]:
    """Return the log-probability of each token of an answer."""
    completion = answer.call.completion
    pieces = [renderer.piece(token) for token in completion.tokens]
    return {
        "content": [
            {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, logprob in zip(pieces, completion.logprobs, strict=True)
        ],
        "refusal": None,
    }
