"""Defines and validates the options of the verifier `judge`."""

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
"""Request fields that `extra` must not set."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `judge`."""

    url: str
    """Base URL of an OpenAI-style server, such as `http://127.0.0.1:8000/v1`; `/chat/completions` is
    appended."""
    model: str
    """Name of the model on the server."""
    prompt: str = ""
    """Template of the question. Placeholders: `{prompt}`, `{response}` (or `{responses}` for all responses of
    a prompt in one request), and metadata fields such as `{answer}`. `{{` escapes a brace."""
    system: str = ""
    """System message, with the same placeholders. Empty: none."""
    messages: str = ""
    """Function of your own, `MODULE:FUNCTION`, that returns the messages; replaces `prompt`."""
    pattern: str = r"-?\d+(?:\.\d+)?"
    """Regular expression of the score in the answer. The last match counts, or its first group if there is
    one. With all responses in one request, the last bracketed list of numbers is parsed instead."""
    parse: str = ""
    """Function of your own that receives the answer's text and returns the score, or a list of scores;
    replaces `pattern`."""
    lowest: float = 0.0
    """Number that maps to score 0. Lower numbers are refused."""
    highest: float = 1.0
    """Number that maps to score 1. Higher numbers are refused."""
    temperature: Annotated[float, Interval(ge=0, le=2)] = 0.0
    max_tokens: Annotated[int, Interval(ge=1, le=1_000_000)] = 512
    """Maximum length of an answer, tokens. A truncated answer has no score."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional fields of the request, such as `response_format`."""
    max_chars: Annotated[int, Interval(ge=1, le=10_000_000)] = 50_000
    """Maximum number of characters of a response shown to the judge. The middle of a longer response is cut,
    and the prompt says so. A function in `messages` receives the whole response."""
    key_env: str = ""
    """Environment variable with the server's API key. Empty: `key_file`, or no key."""
    key_file: str = ""
    """File with the API key."""
    request_timeout_s: Annotated[float, Interval(gt=0, le=1e5)] = 20.0
    """Limit for one request, seconds. `reward.timeout_s` limits all requests for one score."""
    retries: Annotated[int, Interval(ge=0, le=100)] = 4
    """Number of retries after a transient failure, or an answer that is truncated or has no score."""
    backoff_s: Annotated[float, Interval(ge=0, le=60)] = 0.5
    """Wait before the first retry, seconds; doubled for each further retry, up to 60, with jitter. A longer
    `Retry-After` of the server takes precedence."""
    max_requests: Annotated[int, Interval(ge=1, le=10_000)] = 32
    """Maximum number of concurrent requests of one reward service."""
    cache: str = ""
    """SQLite file that caches answers by request. Empty: no cache."""
    cache_entries: Annotated[int, Interval(ge=1, le=10**9)] = 1_000_000
    """Maximum number of cached answers; the oldest are deleted."""
    input_price: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """Price of a million prompt tokens, in any currency."""
    output_price: Annotated[float, Interval(ge=0, le=1e6)] = 0.0
    """Price of a million answer tokens."""


def checked_url(options: Options) -> URL:
    """Return the URL of chat completions.

    Raises:
        SettingsError: the option is not an HTTP URL, or contains a user, password or query, which may be
            secrets.
    """
    try:
        base = URL(options.url)
    except ValueError:
        base = URL()
    if base.scheme not in ("http", "https") or not base.host:
        raise SettingsError(f"{WHAT}: option url is not an HTTP URL, such as http://127.0.0.1:8000/v1")
    if base.user or base.password or base.query_string:
        raise SettingsError(
            f"{WHAT}: option url of host {base.host} has a user, password or query; settings are no place "
            "for secrets: give the key by key_env or key_file"
        )
    return base / "chat" / "completions"


def check_options(options: Options) -> None:
    """Validate options beyond their types and ranges.

    Raises:
        SettingsError: an option is invalid. The message names the option.
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
            raise SettingsError(f"{WHAT}: option extra: {name!r} cannot be set in extra; remove the option")
    try:
        re.compile(options.pattern)
    except re.error as error:
        raise SettingsError(f"{WHAT}: option pattern: {options.pattern!r}: {error}") from None
    try:
        msgspec.json.encode(options.extra)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        raise SettingsError(f"{WHAT}: option extra: {error}") from None


def read_key(options: Options) -> str:
    """Return the API key; empty if none is configured.

    Raises:
        SettingsError: the variable or file is missing, or contains no key. The message does not quote its
            content.
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
