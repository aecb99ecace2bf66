"""Defines the options of the verifier `judge`, and checks them."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from annotated_types import Interval
from yarl import URL

from protocol.errors import SettingsError

WHAT = "verifier judge"
RESERVED = ("model", "messages", "temperature", "max_tokens", "stream", "n")
"""Fields of a request that `extra` cannot set."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `judge`."""

    url: str
    """Base of an OpenAI-style server, such as `http://127.0.0.1:8000/v1`: `/chat/completions` is appended."""
    model: str
    """Name of the model at that server."""
    prompt: str = ""
    """The question, with `{prompt}` and `{response}`, or `{responses}` for all of a prompt in one request,
    and any field of the metadata, such as `{answer}`. `{{` stands for a brace."""
    system: str = ""
    """System message before it, with the same fields. Empty: none."""
    messages: str = ""
    """Instead of `prompt`: a function of your own, `MODULE:FUNCTION`, which returns the messages."""
    pattern: str = r"-?\d+(?:\.\d+)?"
    """Regular expression of the score in the answer: its last match, of that the first group if there is one.
    Not used for all responses in one request, where the last list of numbers in brackets is read."""
    parse: str = ""
    """Instead of `pattern`: a function of your own, which is given the answer's text and returns the score,
    or a list of them."""
    lowest: float = 0.0
    """Number that is a score of 0. Numbers below it are refused."""
    highest: float = 1.0
    """Number that is a score of 1. Numbers above it are refused."""
    temperature: Annotated[float, Interval(ge=0, le=2)] = 0.0
    max_tokens: Annotated[int, Interval(ge=1, le=1_000_000)] = 512
    """Tokens of an answer, at most; one that is cut off by it is no score."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request, such as `response_format`."""
    max_chars: Annotated[int, Interval(ge=1, le=10_000_000)] = 50_000
    """Characters of a response that the judge is shown; of a longer one the middle is left out, and the
    prompt says so. A function in `messages` is given all."""
    key_env: str = ""
    """Environment variable with the key for the server. Empty: `key_file`, or no key."""
    key_file: str = ""
    """File with the key."""
    request_timeout_s: Annotated[float, Interval(gt=0, le=1e5)] = 20.0
    """Limit for one request, seconds. `reward.timeout_s` limits all requests for one score."""
    retries: Annotated[int, Interval(ge=0, le=100)] = 4
    """Further requests after one that failed in passing, or whose answer is cut off or has no score."""
    backoff_s: Annotated[float, Interval(ge=0, le=60)] = 0.5
    """Wait before the first retry, seconds; doubled for each one after it, up to 60, with a random part. A
    server's `Retry-After` counts where it is longer."""
    max_requests: Annotated[int, Interval(ge=1, le=10_000)] = 32
    """Requests at once, of one reward service."""
    cache: str = ""
    """File that keeps answers, by request (SQLite). Empty: none."""
    cache_entries: Annotated[int, Interval(ge=1, le=10**9)] = 1_000_000
    """Answers that it keeps, the newest."""
    input_price: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """Price of a million tokens of prompts, in any currency."""
    output_price: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """Price of a million tokens of answers."""


def checked_url(options: Options) -> URL:
    """Return where requests go to.

    Raises:
        SettingsError: it is no URL of HTTP, or holds a user, password or query, which may be secrets.
    """
    try:
        base = URL(options.url)
    except ValueError:
        base = URL()
    if base.scheme not in ("http", "https") or not base.host:
        raise SettingsError(
            f"{WHAT}: option url is no URL of http or https, such as http://127.0.0.1:8000/v1"
        )
    if base.user or base.password or base.query_string:
        raise SettingsError(
            f"{WHAT}: option url of host {base.host} has a user, password or query; settings are no place "
            "for secrets: give the key by key_env or key_file"
        )
    return base / "chat" / "completions"


def check_options(options: Options) -> None:
    """Check options beyond their types and ranges.

    Raises:
        SettingsError: names the option.
    """
    if not options.model:
        raise SettingsError(f"{WHAT}: option model is empty; name the model at {options.url}")
    if bool(options.prompt) == bool(options.messages):
        raise SettingsError(f"{WHAT}: give one of the options prompt and messages")
    if not options.lowest < options.highest:
        raise SettingsError(
            f"{WHAT}: option lowest: {options.lowest} is not below highest, {options.highest}"
        )
    for name in RESERVED:
        if name in options.extra:
            raise SettingsError(f"{WHAT}: option extra: {name!r} is not for extra; leave it out")
    try:
        re.compile(options.pattern)
    except re.error as error:
        raise SettingsError(f"{WHAT}: option pattern: {options.pattern!r}: {error}") from None
    try:
        msgspec.json.encode(options.extra)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise SettingsError(f"{WHAT}: option extra: {error}") from None


def read_key(options: Options) -> str:
    """Return the key; empty if none is asked for.

    Raises:
        SettingsError: the variable or file is not there, or holds no key; its content is not quoted.
    """
    if options.key_env and options.key_file:
        raise SettingsError(f"{WHAT}: give one of the options key_env and key_file")
    if options.key_env.startswith("TETHER_"):
        raise SettingsError(
            f"{WHAT}: option key_env: {options.key_env}: verifiers see no variable that begins with TETHER_"
        )
    if not options.key_env and not options.key_file:
        return ""
    where = f"environment variable {options.key_env}" if options.key_env else f"file {options.key_file}"
    try:
        key = os.environ[options.key_env] if options.key_env else Path(options.key_file).read_text()
    except (KeyError, OSError, UnicodeDecodeError):
        raise SettingsError(f"{WHAT}: there is no {where}, which should hold the key") from None
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable():
        raise SettingsError(f"{WHAT}: the {where} holds no key of printable characters")
    return key
