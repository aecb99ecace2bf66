"""Formats answers for OpenAI's responses API, as one body or as stream events."""

import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from rollout.render import Renderer
from rollout.sessions.apis.responses import ResponseFields, StoredResponse
from rollout.sessions.bodies import chat_logprobs, usage
from rollout.sessions.requests import HarnessRequest
from rollout.sessions.session import CallAnswer, Session

Body = dict[str, Any]


def response_body(request: HarnessRequest, answer: CallAnswer, renderer: Renderer, name: str) -> Body:
    """Return the response body of a responses request; `name` is its id."""
    cut = answer.finish_reason == "length"
    return {
        **_head(request, name),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(_items(request, answer, renderer, name)),
        "usage": _usage(answer),
    }


def response_start(request: HarnessRequest, name: str) -> Body:
    """Return the first event of a stream, sent before the answer is generated."""
    return {"type": "response.created", "sequence_number": 0, "response": _head(request, name)}


def response_events(
    request: HarnessRequest, answer: CallAnswer, renderer: Renderer, name: str
) -> Iterator[Body]:
    """Yield the events of a streamed answer after the first event."""
    body = response_body(request, answer, renderer, name)
    for number, event in enumerate(_events(request, body, name), start=1):
        yield {**event, "sequence_number": number}


def kept_response(
    session: Session, request: HarnessRequest, answer: CallAnswer, name: str
) -> StoredResponse | None:
    """Return the response to store in a session; None if the request does not ask for storage."""
    response = _fields(request)
    if not response.store:
        return None
    body = response_body(request, answer, session.renderer, name)
    messages: Sequence[Body] = (*response.messages, answer.message)
    if known := list(session.stored.values()):
        messages = _sharing(messages, known[-1].messages)
        repeated = ("instructions", "tools")
        body |= {field: known[-1].body[field] for field in repeated if body[field] == known[-1].body[field]}
    return StoredResponse(tuple(messages), body)


def _sharing(messages: Sequence[Body], earlier: Sequence[Body]) -> Sequence[Body]:
    """Return the messages, with the prefix equal to `earlier` replaced by the same objects to save memory."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(messages, earlier, strict=False)))
    return (*earlier[:same], *messages[same:])


def _fields(request: HarnessRequest) -> ResponseFields:
    if not isinstance(request.response, ResponseFields):
        raise TypeError("not a request of the responses API")
    return request.response


def _head(request: HarnessRequest, name: str) -> Body:
    """Return the response body before any token is generated."""
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        **_fields(request).fields,
    }


def _items(request: HarnessRequest, answer: CallAnswer, renderer: Renderer, name: str) -> Iterator[Body]:
    """Yield the output items of an answer: thoughts, text, tool calls."""
    status = "incomplete" if answer.finish_reason == "length" else "completed"
    tail, message = name.removeprefix("resp_"), answer.message
    if thoughts := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": thoughts}]
        yield {"type": "reasoning", "id": f"rs_{tail}", "summary": [], "content": content, "status": status}
    calls = message.get("tool_calls", [])
    if message["content"] or not calls:
        logprobs = chat_logprobs(answer, renderer)["content"] if request.logprobs else []
        text = {
            "type": "output_text", "text": message["content"], "annotations": [], "logprobs": logprobs,
        }  # fmt: skip
        yield {
            "type": "message", "id": f"msg_{tail}", "role": "assistant", "status": status, "content": [text],
        }  # fmt: skip
    for call in calls:
        yield {
            "type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": status,
            **call["function"],
        }  # fmt: skip


def _events(request: HarnessRequest, body: Body, name: str) -> Iterator[Body]:
    yield {"type": "response.in_progress", "response": _head(request, name)}
    for index, item in enumerate(body["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        empty: Body = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        begun = {**item, "status": "in_progress", **empty}
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        if item["type"] == "function_call":
            said = item["arguments"]
            yield {"type": "response.function_call_arguments.delta", **place, "delta": said}
            yield {
                "type": "response.function_call_arguments.done", **place, "arguments": said,
                "name": item["name"],
            }  # fmt: skip
        else:
            yield from _text_events({**place, "content_index": 0}, item["content"][0])
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{body['status']}", "response": body}


def _text_events(place: Body, part: Body) -> Iterator[Body]:
    kind, text = f"response.{part['type']}", part["text"]
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    yield {"type": f"{kind}.delta", **place, "delta": text, **logprobs}
    yield {"type": f"{kind}.done", **place, "text": text, **logprobs}
    yield {"type": "response.content_part.done", **place, "part": part}


def _usage(answer: CallAnswer) -> Body:
    counts = usage(answer)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
