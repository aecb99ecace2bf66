"""Parses and answers requests of vLLM's tokens-in, tokens-out API, `/inference/v1/generate`."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rollout.render import Renderer
from rollout.sessions.bodies import chat_logprobs, usage
from rollout.sessions.refusal import RequestRefused, check_supported, invalid
from rollout.sessions.requests import HarnessRequest, is_token, read_text, repeated_name
from rollout.sessions.sampling import SamplingRules
from rollout.sessions.session import CallAnswer

WITHOUT_EFFECT = ("token_offsets", "cache_salt", "reasoning_ended", "reasoning_parser_kwargs")
"""Request fields that do not affect tokens here."""
SHAPE = ("token_ids", "sampling_params", "request_id", "return_token_ids", "output_mode")
"""Fields specific to this API. Other fields are parsed as in a completion request, or refused."""
DETOKENIZATION = (
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
"""Parameters that do not affect tokens."""
ONLY: dict[str, tuple[Any, ...]] = {
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "logprobs": (0, 1),
}
"""Parameter -> supported values besides null. vLLM returns the sampled token for both values of `logprobs`.
"""
Body = dict[str, Any]


def read_generate(body: Any, *, rules: SamplingRules) -> HarnessRequest:
    """Parse the body of a generate request; arguments and errors: see `read_chat`."""
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    tokens, sampling = body.get("token_ids"), body.get("sampling_params")
    if not isinstance(tokens, list) or not tokens or not all(map(is_token, tokens)):
        raise invalid("token_ids must be a list of at least one token's id", "token_ids")
    if not isinstance(sampling, dict):
        raise invalid("sampling_params must be an object", "sampling_params")
    if body.get("output_mode") not in (None, "tokens", "text"):
        raise invalid("output_mode must be 'tokens' or 'text'", "output_mode")
    if body.get("priority") == 0:
        body = {name: value for name, value in body.items() if name != "priority"}
    fields = {name: value for name, value in body.items() if name not in (*SHAPE, *WITHOUT_EFFECT)}
    for name, value in sampling.items():
        if supported := ONLY.get(name):
            check_supported(f"sampling_params.{name}", value, supported)
        elif name not in DETOKENIZATION:
            fields[name] = value
    return replace(
        read_text({**fields, "prompt": tokens}, rules=rules),
        logprobs=sampling.get("logprobs") is not None,
        name=repeated_name(body, "request_id"),
        with_text=body.get("output_mode") == "text",
        with_prompt=bool(body.get("return_token_ids")),
    )


def generate_body(request: HarnessRequest, answer: CallAnswer, renderer: Renderer, name: str) -> Body:
    """Return the response body of a generate request; `name` is its id if the request has none."""
    return {
        "request_id": request.name or name,
        "model": request.model,
        "created": int(time.time()),
        "output_mode": "text" if request.with_text else "tokens",
        "choices": _choices(request, answer, renderer),
        "usage": usage(answer),
        "prompt_logprobs": None,
        "prompt_token_ids": request.prompt if request.with_prompt else None,
    }


def generate_events(
    request: HarnessRequest, answer: CallAnswer, renderer: Renderer, name: str
) -> Iterator[Body]:
    """Yield the events of a streamed answer; one event contains all tokens."""
    head = {
        "request_id": request.name or name, "output_mode": "text" if request.with_text else "tokens",
    }  # fmt: skip
    prompt = {"prompt_token_ids": request.prompt} if request.with_prompt else {}
    yield {**head, **prompt, "choices": _choices(request, answer, renderer)}
    if request.include_usage:
        yield {**head, "choices": [], "usage": usage(answer)}


def generate_error(refusal: RequestRefused) -> Body:
    """Return a refusal in vLLM's error format, with the HTTP status as the code."""
    kind = "BadRequestError" if refusal.status == 400 else refusal.code
    fields = {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.status}
    return {"error": fields}


def _choices(request: HarnessRequest, answer: CallAnswer, renderer: Renderer) -> list[Body]:
    answers = enumerate((answer, *answer.others))
    return [{**_choice(request, each, renderer), "index": index} for index, each in answers]


def _choice(request: HarnessRequest, answer: CallAnswer, renderer: Renderer) -> Body:
    completion = answer.call.completion
    choice: Body = {
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stopped_by or None,
        "token_ids": completion.tokens,
        "logprobs": None,
        "routed_experts": None,
        "weight_versions": _version_spans(completion.spans),
    }
    if request.with_text:
        choice["text"] = answer.text
    if request.logprobs and request.with_text:
        choice["logprobs"] = chat_logprobs(answer, renderer)
    elif request.logprobs:
        each = [
            {"token_id": token, "logprob": logprob, "rank": None}
            for token, logprob in zip(completion.tokens, completion.logprobs, strict=True)
        ]
        choice["logprobs"] = {"content": [{**entry, "top_logprobs": [entry]} for entry in each]}
    return choice


def _version_spans(spans: tuple[tuple[int, int], ...]) -> list[Body]:
    """Return the token range [start, end) sampled under each version."""
    starts = [0, *(end for end, _ in spans)]
    return [
        {"version": str(version), "start": start, "end": end}
        for start, (end, version) in zip(starts, spans, strict=False)
    ]
