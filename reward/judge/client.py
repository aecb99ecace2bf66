"""Requests chat completions from an OpenAI-style server, with retries of transient failures."""

import asyncio
import hashlib
import random
import sqlite3
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec
from msgspec import Meta

from protocol.errors import RewardError
from reward.judge.cache import AnswerCache
from reward.judge.config import Options, checked_url
from reward.judge.question import Messages
from reward.judge.reading import Unreadable
from reward.verifiers.base import Notes

T = TypeVar("T")
RETRY_STATUSES = {408, 409, 425, 429, *range(500, 600)}
"""HTTP statuses that are retried."""
MAX_BACKOFF_S = 60.0
"""Maximum wait before a retry, even if the server asks for more."""
TRUNCATED_REASONS = ("length", "model_length", "content_filter", "abort", "error")
"""Finish reasons of incomplete answers, whose last words are no verdict. The finish reasons of complete
answers vary between servers, and may be missing."""
MAX_BODY = 4 << 20
"""Maximum size of a response body, bytes."""
MAX_TOKENS = 10**9
"""Largest plausible token count in a usage report."""
MAX_SHOWN = 200
"""Maximum number of characters of an answer in an error message."""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    completion_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _TransientError(Exception):
    """Transient failure; a retry may succeed."""

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.wait_s = wait_s
        """Wait requested by the server, seconds."""


class JudgeClient:
    """Connections to one server, for use in a single event loop."""

    def __init__(self, options: Options, key: str) -> None:
        """Validate the URL and open the cache. Opens no connection.

        Raises:
            SettingsError: the URL is invalid or the cache cannot be opened.
        """
        self._options, self._key, self._url = options, key, checked_url(options)
        self._cache = AnswerCache(options.cache, options.cache_entries) if options.cache else None
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, messages: Messages, read: Callable[[str], T], notes: Notes) -> T:
        """Return `read`'s result for the answer to some messages, from the cache or the server.

        Cancellation closes the request's connection.

        Args:
            messages: messages to send.
            read: extracts the result from the answer's text; raises Unreadable to request another answer.
            notes: receives counts of requests, retries and failures, and the answer's text.

        Raises:
            RewardError: all retries failed, or a failure is permanent. The message names the URL.
        """
        body = self._body(messages)
        digest = hashlib.sha256(f"{self._url}\n".encode() + body).digest()
        cached = await self._kept(digest, notes)
        if cached is not None:
            try:
                scores = read(cached)
            except Unreadable:
                pass  # cached under other parsing options
            else:
                notes.counts["cache_hits"] += 1
                notes.text = cached
                return scores
        for attempt in range(self._options.retries + 1):
            try:
                text = await self._request(body, notes)
                notes.text = self._without_key(text)
                scores = read(text)
            except (_TransientError, Unreadable) as error:
                notes.problem = self._without_key(f"{self._url}: {error}")
                if attempt < self._options.retries:
                    notes.counts["retries"] += 1
                    await asyncio.sleep(self._wait_s(attempt, getattr(error, "wait_s", 0.0)))
            else:
                await self._keep(digest, text, notes)
                return scores
        raise RewardError(f"{notes.problem} ({self._options.retries + 1} requests)")

    async def close(self) -> None:
        """Close all connections and the cache."""
        if self._session is not None:
            await self._session.close()
        if self._cache is not None:
            self._cache.close()

    def _body(self, messages: Messages) -> bytes:
        options = self._options
        fields: dict[str, Any] = {
            "model": options.model,
            "messages": messages,
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
        }
        try:
            return msgspec.json.encode(fields | options.extra, order="deterministic")
        except (TypeError, ValueError, UnicodeEncodeError, msgspec.MsgspecError) as error:
            raise RewardError(f"the messages are not valid JSON: {error}") from None

    async def _request(self, body: bytes, notes: Notes) -> str:
        """Send one request and return the text of its answer."""
        if self._session is None:
            headers = {"Content-Type": "application/json"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            self._session = aiohttp.ClientSession(
                headers=headers,
                connector=aiohttp.TCPConnector(limit=self._options.max_requests),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        began = time.monotonic()
        notes.counts["requests"] += 1
        try:
            async with (
                asyncio.timeout(self._options.request_timeout_s) as limit,
                self._session.post(self._url, data=body, allow_redirects=False, timeout=NO_LIMIT) as answer,
            ):
                data = await _read(answer)
        except TimeoutError:
            if not limit.expired():
                raise _TransientError("the connection timed out") from None
            raise _TransientError(f"no answer within {self._options.request_timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _TransientError(f"{type(error).__name__}: {error}") from None
        finally:
            notes.counts["request_seconds"] += time.monotonic() - began
        if answer.status != 200:
            raise self._refused(answer.status, answer.headers.get("Retry-After", ""), data)
        return self._text(data, notes)

    def _refused(self, status: int, retry_after: str, data: bytes) -> Exception:
        text = f"status {status}: {' '.join(data.decode(errors='replace').split())[:MAX_SHOWN]}"
        if status in RETRY_STATUSES:
            return _TransientError(text, _seconds(retry_after))
        return RewardError(self._without_key(f"{self._url}: {text}"))

    def _text(self, data: bytes, notes: Notes) -> str:
        try:
            completion = msgspec.json.decode(data, type=_Completion)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _TransientError(f"an answer that is no chat completion: {error}") from None
        if completion.usage is not None:
            read, written = completion.usage.prompt_tokens, completion.usage.completion_tokens
            notes.counts["prompt_tokens"] += read
            notes.counts["completion_tokens"] += written
            notes.counts["cost"] += (
                read * self._options.input_price + written * self._options.output_price
            ) / 1e6
        if not completion.choices:
            raise _TransientError("a chat completion without text")
        choice = completion.choices[0]
        if choice.finish_reason in TRUNCATED_REASONS:
            raise _TransientError(
                f"an answer that was cut off (finish_reason {choice.finish_reason!r}, option max_tokens "
                f"{self._options.max_tokens}); increase max_tokens if the judge needs more to finish"
            )
        if choice.message.content is None:
            raise _TransientError("a chat completion without text")
        return choice.message.content

    async def _kept(self, digest: bytes, notes: Notes) -> str | None:
        if self._cache is None:
            return None
        try:
            return await asyncio.to_thread(self._cache.get, digest)
        except sqlite3.Error as error:
            self._note_cache(error, notes)
            return None

    async def _keep(self, digest: bytes, text: str, notes: Notes) -> None:
        if self._cache is None:
            return
        try:
            await asyncio.to_thread(self._cache.put, digest, text)
        except (sqlite3.Error, UnicodeEncodeError) as error:
            self._note_cache(error, notes)

    def _note_cache(self, error: Exception, notes: Notes) -> None:
        notes.counts["cache_errors"] += 1
        notes.problem = f"cache {self._options.cache}: {error}"

    def _wait_s(self, attempt: int, asked_s: float) -> float:
        """Return the wait after an attempt: exponential backoff, with jitter against simultaneous retries."""
        longest = min(MAX_BACKOFF_S, self._options.backoff_s * 2 ** min(attempt, 16))
        return min(MAX_BACKOFF_S, max(asked_s, random.uniform(longest / 2, longest)))

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


NO_LIMIT = aiohttp.ClientTimeout(total=None)
"""Disables aiohttp's timeout; `_request` applies its own."""


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    data = b""
    async for chunk in answer.content.iter_any():
        data += chunk
        if len(data) > MAX_BODY:
            raise _TransientError(f"an answer of more than {MAX_BODY} bytes")
    return data


def _seconds(retry_after: str) -> float:
    """Return the wait of a Retry-After header, seconds: a number or a date; 0 for anything else."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
