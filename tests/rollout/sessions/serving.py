"""Serves a session for tests, with an engine that answers each call alike."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI

from rollout.engines.base import Completion
from rollout.sample import Generate
from rollout.sessions.answers.reader import AnswerReader
from rollout.sessions.endpoint import SessionEndpoint
from rollout.sessions.sampling import SamplingRules
from rollout.sessions.session import GenerateAs, Session, SessionLimits
from tests.rollout.sessions.chats import renderer

USER = {"role": "user", "content": "abc"}
HELLO = "hello there"
CALLS = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


async def says(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
    """Answers each call alike."""
    said = renderer("tool use").encode(HELLO)[: max_tokens or None]
    return Completion(
        said, (-0.5,) * len(said), ((len(said), 3),), "stop" if max_tokens is None else "length"
    )


@asynccontextmanager
async def served(
    generate: Generate = says,
    limits: SessionLimits | None = None,
    reader: AnswerReader | None = None,
    max_model_len: int = 0,
    rules: SamplingRules | None = None,
    generate_as: GenerateAs | None = None,
    **options: Any,
) -> AsyncIterator[tuple[AsyncOpenAI, Session, SessionEndpoint, str]]:
    endpoint = SessionEndpoint(**options)
    await endpoint.start()
    session = Session(
        generate,
        renderer("tool use"),
        limits or SessionLimits(),
        reader,
        max_model_len=max_model_len,
        rules=rules,
        generate_as=generate_as,
    )
    key = endpoint.open(session)
    try:
        async with AsyncOpenAI(base_url=endpoint.url(key), api_key=key, max_retries=2) as client:
            yield client, session, endpoint, key
    finally:
        await endpoint.close()


async def calls(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
    """Answers each call with text and a call of a tool."""
    said = renderer("tool use").encode(CALLS)
    return Completion(said, (-0.5,) * len(said), ((len(said), 0),), "stop")


async def thinks(tokens: tuple[int, ...], max_tokens: int | None) -> Completion:
    """Answers each call with thoughts and text."""
    said = renderer("tool use").encode(f"<think>hm</think>{HELLO}")
    return Completion(said, (-0.5,) * len(said), ((len(said), 0),), "stop")
