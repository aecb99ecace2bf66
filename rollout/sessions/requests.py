"""Parses request bodies of the OpenAI API, and refuses requests that cannot be fulfilled exactly."""

import json
from dataclasses import dataclass
from typing import Any

from rollout.bounded_json import TooManyValues, parsed_json
from rollout.sessions.messages import Dialogue, read_dialogue
from rollout.sessions.refusal import RequestRefused, check_supported, invalid, unsupported
from rollout.sessions.sampling import UNCHANGED, RequestSampling, SamplingRules

WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip
"""Fields that do not affect tokens."""
DEFAULTS: dict[str, Any] = {
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "echo": False,
    "suffix": "",
}
"""Field -> its only supported value."""
MAX_NAME = 256
"""Maximum characters of a name that the answer repeats."""
COMMON = ("max_tokens", "stream", "stream_options", "logprobs")
CHAT = ("messages", "tools", "tool_choice", "max_completion_tokens")
TEXT = ("prompt",)
FORMS_OF_LOGPROBS: dict[tuple[str, ...], tuple[tuple[Any, ...], str]] = {
    CHAT: ((None, False, True), "true or false"),
    TEXT: ((None, 0), "0: that of each sampled token"),
}
"""API -> (supported values of `logprobs`, their description)."""


@dataclass(frozen=True, slots=True)
class HarnessRequest:
    """Parsed request of a harness."""

    model: str
    """Model name, repeated in the answer."""
    max_tokens: int | None
    stream: bool
    include_usage: bool
    """Whether a stream ends with the token usage."""
    logprobs: bool
    overridden: tuple[str, ...]
    """Sampling parameters in the request that are not applied."""
    sampling: RequestSampling | None = None
    """Parameters that replace the run's and make the answers context; None: the run's parameters apply."""
    dialogue: Dialogue | None = None
    """Messages and tools of a chat request."""
    tools: bool = False
    """Whether tool calls are parsed from the answer."""
    prompt: str | tuple[int, ...] = ""
    """Prompt of a completion request: text or token ids."""
    response: object = None
    """`ResponseFields` of a responses request."""
    name: str = ""
    """Request id of a generate request."""
    with_text: bool = False
    """Whether the answer to a generate request contains text."""
    with_prompt: bool = False
    """Whether the answer to a generate request repeats the prompt's token ids."""


def read_body(body: bytes, tokens: int = 0) -> Any:
    """Parse the JSON body of a request.

    Args:
        body: raw body.
        tokens: number of token ids allowed in addition to `MAX_VALUES` values.

    Raises:
        RequestRefused: the body is not JSON, or has too many values.
    """
    try:
        return parsed_json(body.decode(json.detect_encoding(body)), tokens)
    except TooManyValues as error:
        raise RequestRefused(413, "too_many_values", f"the body has {error}") from None
    except UnicodeError:
        raise invalid("the body has a code point that is not text") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None


def read_chat(body: Any, *, rules: SamplingRules) -> HarnessRequest:
    """Parse the body of a chat request.

    Args:
        body: parsed JSON.
        rules: handling of sampling parameters.

    Raises:
        RequestRefused: the request is malformed or unsupported; the message names the field.
    """
    common = _common(body, CHAT, rules)
    choice = body.get("tool_choice") or "auto"
    if choice not in ("auto", "none"):
        raise unsupported("tool_choice", choice, "'auto' or 'none'")
    completion = _count(body, "max_completion_tokens")
    if completion is not None and common["max_tokens"] not in (None, completion):
        raise invalid(
            "max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens"
        )
    common["max_tokens"] = completion if common["max_tokens"] is None else common["max_tokens"]
    dialogue = read_dialogue(body.get("messages"), body.get("tools"))
    return HarnessRequest(dialogue=dialogue, tools=bool(dialogue.tools) and choice == "auto", **common)


def read_text(body: Any, *, rules: SamplingRules) -> HarnessRequest:
    """Parse the body of a completion request; arguments and errors: see `read_chat`."""
    common = _common(body, TEXT, rules)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(map(is_token, prompt)):
        prompt = tuple(prompt)
    if not prompt or not isinstance(prompt, (str, tuple)):
        raise invalid("prompt must be one text, or the ids of one text's tokens; not empty", "prompt")
    return HarnessRequest(prompt=prompt, **common)


def is_token(value: Any) -> bool:
    """Return whether a value is a valid token id (int32)."""
    return type(value) is int and 0 <= value < 2**31


def repeated_name(body: dict[str, Any], field: str) -> str:
    """Return a name that the answer repeats; empty if the field is not text."""
    name = body.get(field)
    if isinstance(name, str) and len(name) > MAX_NAME:
        raise invalid(f"{field} has {len(name)} characters, over {MAX_NAME}", field)
    return name if isinstance(name, str) else ""


def _common(body: Any, fields: tuple[str, ...], rules: SamplingRules) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    for name, value in body.items():
        if value is None or name in (*COMMON, *fields, *WITHOUT_EFFECT, *UNCHANGED):
            continue
        if name not in DEFAULTS:
            raise invalid(f"{name} is not known here", name, "unknown_parameter")
        check_supported(name, value, [DEFAULTS[name]])
    sampling, overridden = rules.read(body)
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise invalid("stream_options must be an object", "stream_options")
    known, meaning = FORMS_OF_LOGPROBS[fields]
    logprobs = body.get("logprobs")
    if logprobs not in known:
        raise unsupported("logprobs", logprobs, meaning)
    return {
        "model": repeated_name(body, "model"),
        "max_tokens": _count(body, "max_tokens"),
        "stream": bool(body.get("stream")),
        "include_usage": bool(options.get("include_usage")),
        "logprobs": logprobs is not None and logprobs is not False,
        "overridden": overridden,
        "sampling": sampling,
    }


def with_one_answer(request: HarnessRequest) -> HarnessRequest:
    """Return the request; refuse n > 1 for APIs with a single answer."""
    if request.sampling is not None and request.sampling.n > 1:
        raise invalid("n is not known here", "n", "unknown_parameter")
    return request


def _count(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise invalid(f"{name} is {value!r}, it must be a whole number of at least 1", name)
    return value
