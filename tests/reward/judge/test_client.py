"""Tests requests to a judge against a server that is slow, overloaded, broken or talks nonsense."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from protocol.errors import RewardError
from reward.judge.client import JudgeClient
from reward.judge.config import Options
from reward.judge.reading import Unreadable
from reward.verifiers.base import Notes
from tests.reward.judge_server import HANG, JudgeServer, completion, judge_server

MESSAGES = [{"role": "user", "content": "Is it good?"}]
OPTIONS = Options(url="", model="m", prompt="{response}", backoff_s=0.0, retries=2)


def last_digit(text: str) -> float:
    """Read the number that a text ends with."""
    return float(text[-1])


def one(text: str) -> float:
    """Read a number."""
    try:
        return float(text)
    except ValueError:
        raise Unreadable(f"no number in {text!r}") from None


@asynccontextmanager
async def asking(
    *replies: Any, key: str = "", **changes: Any
) -> AsyncIterator[tuple[JudgeServer, JudgeClient]]:
    """Serve these replies, the last one for ever, with a client."""
    following: Iterator[Any] = itertools.chain(replies, itertools.repeat(replies[-1]))
    async with judge_server(lambda _: made(next(following))) as server:
        client = JudgeClient(replace(OPTIONS, url=server.url, **changes), key)
        try:
            yield server, client
        finally:
            await client.close()


def made(reply: Any) -> "str | web.Response":
    return reply() if callable(reply) else reply


def status(code: int, body: str = "", **headers: str) -> Callable[[], web.Response]:
    return lambda: web.Response(status=code, text=body, headers=headers)


async def test_an_answer_is_read_and_its_tokens_are_counted() -> None:
    async with asking("0.5", input_price=2.0, output_price=10.0, extra={"seed": 3}) as (server, client):
        notes = Notes()
        assert await client.ask(MESSAGES, one, notes) == 0.5
    counts = dict(notes.counts)
    assert counts.pop("request_seconds") > 0
    assert counts == {
        "requests": 1, "prompt_tokens": 100, "completion_tokens": 10, "cost": pytest.approx(3e-4),
    }  # fmt: skip
    assert notes.text == "0.5"
    assert server.requests == [
        {"model": "m", "messages": MESSAGES, "temperature": 0.0, "max_tokens": 512, "seed": 3}
    ]


@pytest.mark.parametrize(
    "failure",
    [
        status(429, **{"Retry-After": "0"}),
        status(429, **{"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        status(429, **{"Retry-After": "soon"}),
        status(500),
        status(503, "overloaded"),
        status(200, "garbage"),
        status(200, "[" * 100_000),
        status(200, '{"choices": []}'),
        status(200, '{"choices": [{"message": {"content": null}}]}'),
        lambda: web.Response(body=b"\xff\xfe{"),
        lambda: web.Response(body=b" " * (5 << 20)),
        lambda: web.json_response(completion({"no": "text"})),
        lambda: web.json_response(completion("1") | {"usage": {"prompt_tokens": 10**400}}),
        lambda: web.json_response(completion("1") | {"usage": {"completion_tokens": -1}}),
        lambda: web.json_response(completion("0", "length")),
        lambda: web.json_response(completion("0", "content_filter")),
        "I like it",
    ],
)
async def test_temporary_error_is_asked_again(failure: Any) -> None:
    async with asking(failure, "1") as (server, client):
        notes = Notes()
        assert await client.ask(MESSAGES, one, notes) == 1.0
    assert len(server.requests) == 2
    assert (notes.counts["requests"], notes.counts["retries"]) == (2, 1)


async def test_a_server_that_hangs_is_asked_again_after_the_limit() -> None:
    async with asking(HANG, "1", request_timeout_s=0.3) as (_, client):
        notes = Notes()
        assert await client.ask(MESSAGES, one, notes) == 1.0
    assert "no answer within 0.3 s" in notes.problem


@pytest.mark.parametrize(
    ("failure", "says", "requests"),
    [
        (status(500, "out of memory"), r"/v1/chat/completions: status 500: out of memory \(3 requests\)", 3),
        ("nonsense", r"/v1/chat/completions: no number in 'nonsense' \(3 requests\)", 3),
        (
            lambda: web.json_response(completion("0", "length")),
            r"cut off \(finish_reason 'length', option max_tokens 512\); increase .*\(3 requests\)",
            3,
        ),
        (status(401, "no such key"), "/v1/chat/completions: status 401: no such key$", 1),
        (status(404), "/v1/chat/completions: status 404", 1),
        (status(302, Location="http://127.0.0.1:1/"), "status 302", 1),
    ],
)
async def test_permanent_error_names_the_url(failure: Any, says: str, requests: int) -> None:
    async with asking(failure) as (server, client):
        with pytest.raises(RewardError, match=says):
            await client.ask(MESSAGES, one, Notes())
    assert len(server.requests) == requests


async def test_a_server_that_is_not_there_is_named() -> None:
    client = JudgeClient(replace(OPTIONS, url="http://127.0.0.1:9/v1"), "")
    with pytest.raises(RewardError, match=r"http://127\.0\.0\.1:9/v1/chat/completions: ClientConnector"):
        await client.ask(MESSAGES, one, Notes())
    await client.close()


async def test_the_key_is_sent_and_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    key = "sk-very-secret"
    async with asking(status(400, f"bad key {key}"), key=key) as (server, client):
        with pytest.raises(RewardError) as caught:
            await client.ask(MESSAGES, one, Notes())
    assert server.headers[0]["Authorization"] == f"Bearer {key}"
    assert "bad key ***" in str(caught.value)
    assert key not in caplog.text


async def test_a_cancelled_question_ends_its_request() -> None:
    async with asking(HANG) as (server, client):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.ask(MESSAGES, one, Notes())
        async with asyncio.timeout(60):
            while server.running:  # noqa: ASYNC110 (the server notices by itself)
                await asyncio.sleep(0.01)


async def test_the_same_question_is_asked_once(tmp_path: Path) -> None:
    cache = str(tmp_path / "judge" / "cache.sqlite")
    async with asking("0.5", "0.7", cache=cache) as (server, client):
        first, second, other = Notes(), Notes(), Notes()
        assert await client.ask(MESSAGES, one, first) == 0.5
        assert await client.ask(MESSAGES, one, second) == 0.5
        assert await client.ask([*MESSAGES, *MESSAGES], one, other) == 0.7
        assert len(server.requests) == 2
    assert (second.text, dict(second.counts)) == ("0.5", {"cache_hits": 1})
    assert "cache_hits" not in other.counts


async def test_an_answer_without_a_score_is_not_kept(tmp_path: Path) -> None:
    async with asking("nonsense", "1", cache=str(tmp_path / "cache"), retries=0) as (_, client):
        with pytest.raises(RewardError):
            await client.ask(MESSAGES, one, Notes())
        assert await client.ask(MESSAGES, one, Notes()) == 1.0


async def test_an_answer_that_was_cut_off_is_not_kept(tmp_path: Path) -> None:
    cut = completion("0 is wrong and 1 is right. Let me check step 1", "length")
    async with asking(lambda: web.json_response(cut), "0", cache=str(tmp_path / "cache"), retries=0) as (
        server,
        client,
    ):
        with pytest.raises(RewardError, match="cut off"):
            await client.ask(MESSAGES, last_digit, Notes())
        notes = Notes()
        assert await client.ask(MESSAGES, last_digit, notes) == 0.0
    assert "cache_hits" not in notes.counts
    assert len(server.requests) == 2


@pytest.mark.parametrize("reason", [None, "stop", "eos_token"])
async def test_an_answer_counts_whatever_word_a_server_has_for_finished(reason: str | None) -> None:
    async with asking(lambda: web.json_response(completion("1", reason))) as (server, client):
        assert await client.ask(MESSAGES, one, Notes()) == 1.0
    assert len(server.requests) == 1


async def test_a_broken_cache_is_counted_and_stops_nothing(tmp_path: Path) -> None:
    async with asking("1", cache=str(tmp_path / "cache")) as (_, client):
        assert client._cache is not None
        client._cache.close()
        notes = Notes()
        assert await client.ask(MESSAGES, one, notes) == 1.0
        assert notes.counts["cache_errors"] == 2
        assert "Cannot operate on a closed database" in notes.problem
        client._cache = None
