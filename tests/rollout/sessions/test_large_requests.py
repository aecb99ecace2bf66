"""Large requests: one at a time is read for a session, as small ones are, and its limits hold meanwhile."""

import asyncio
import functools
import json
import threading
from typing import Any

import pytest

from rollout.off_loop import LARGE
from rollout.sessions.refusal import RequestRefused
from rollout.sessions.requests import HarnessRequest, read_chat
from rollout.sessions.sampling import SamplingRules
from rollout.sessions.session import Session, SessionLimits
from tests.rollout.sessions.chats import renderer
from tests.rollout.sessions.serving import USER, says

PAD = " " * LARGE
CHAT = functools.partial(read_chat, rules=SamplingRules())


def opened(max_model_len: int = 0, **limits: int) -> Session:
    return Session(says, renderer("tool use"), SessionLimits(**limits), max_model_len=max_model_len)


def body(*messages: Any, pad: str = PAD) -> bytes:
    return (json.dumps({"messages": messages}) + pad).encode()


async def refused(session: Session, given: bytes) -> RequestRefused:
    with pytest.raises(RequestRefused) as found:
        await session.read(given, CHAT)
    return found.value


async def test_a_large_request_begins_as_a_small_one_does() -> None:
    messages: list[Any] = [USER]
    small, large = opened(), opened()
    for _ in range(3):
        pending = await small.read(body(*messages, pad=""), CHAT)
        other = await large.read(body(*messages), CHAT)
        assert (pending.context, pending.key, pending.inserted) == (other.context, other.key, other.inserted)
        answer = await small.answer(pending)
        await large.answer(other)
        messages += [answer.message, USER]
    assert len(small.tree.calls[-1].path()) == len(large.tree.calls[-1].path()) == 3


async def test_a_request_that_cannot_fit_is_refused_unread() -> None:
    """A refused later call is the end of the episode, which is no failure of its sample."""

    def unread(parsed: Any) -> HarnessRequest:
        raise AssertionError("it was read")

    session, long = opened(max_model_len=64), b'{"messages": "' + b"x" * 10**6
    for code, truncated in (("context_length_exceeded", False), ("episode_over", True)):
        with pytest.raises(RequestRefused, match=r"at least [0-9]+ tokens") as found:
            await session.read(long, unread)
        assert (found.value.status, found.value.code, session.truncated) == (400, code, truncated)
        await session.answer(await session.read(body(USER), CHAT))
    assert not session.truncated


async def test_a_message_that_cannot_fit_is_refused_before_it_is_tokens() -> None:
    session = opened(max_model_len=64)
    await session.answer(await session.read(body(USER), CHAT))
    long = body({"role": "user", "content": "x" * 50_000})
    assert (await refused(session, long)).code == "episode_over"
    assert session.truncated


async def test_requests_that_are_read_count_as_running_and_end_with_the_session() -> None:
    """The thread waits for the test, so that all of them are under way."""
    session, free = opened(max_running=2), threading.Event()

    def waits(parsed: Any) -> HarnessRequest:
        assert free.wait(60)
        return CHAT(parsed)

    async with asyncio.TaskGroup() as tasks:
        reads = [tasks.create_task(_outcome(session, waits)) for _ in range(2)]
        await asyncio.sleep(0)  # both have begun
        assert (await refused(session, body(USER))).code == "too_many_running"
        session.end("its episode is over")
        free.set()
    assert {read.result() for read in reads} == {"session_ended"}
    assert not session.tree.calls


async def _outcome(session: Session, asked: Any) -> str:
    try:
        await session.read(body(USER), asked)
    except RequestRefused as refusal:
        return refusal.code
    return ""


async def test_who_hangs_up_leaves_its_place_to_others() -> None:
    session, free = opened(max_running=1), threading.Event()

    def waits(parsed: Any) -> HarnessRequest:
        assert free.wait(60)
        return CHAT(parsed)

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(_outcome(session, waits))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        free.set()
        await session.answer(await session.read(body(USER), CHAT))
    assert len(session.tree.calls) == 1


async def test_a_request_of_too_many_values_is_refused() -> None:
    many = await refused(opened(), json.dumps([[]] * 200_000).encode())
    assert (many.status, many.code) == (413, "too_many_values")
    quoted = await refused(opened(), body({"role": "r" * 10**5, "content": ""}))
    assert len(quoted.message) == 1000
