"""Answers one client call, as one body or as a stream, in the format of the client's API."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import hdrs, web

from rollout.off_loop import TOKEN, off_loop
from rollout.sessions import bodies
from rollout.sessions.apis import anthropic, generate, response_bodies, responses
from rollout.sessions.refusal import RequestRefused
from rollout.sessions.requests import HarnessRequest, read_chat, read_text
from rollout.sessions.session import CallAnswer, PendingCall, Session

_log = logging.getLogger("tether.sessions")

Body = dict[str, Any]
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Api:
    """One client API."""

    path: str
    """URL path after `/s/KEY`."""
    prefix: str
    """Prefix of answer ids."""
    read: Callable[..., HarnessRequest]
    """(body, rules) -> parsed request. If `keep` is set, also gets `stored`."""
    whole: Callable[..., Body]
    """(request, answer, renderer, name) -> response body."""
    events: Callable[..., Iterable[Body]]
    """(request, answer, renderer, name) -> stream events."""
    start: Callable[[HarnessRequest, str], Body] | None = None
    """(request, name) -> first event, sent before the answer is generated."""
    last: bytes = b""
    """Bytes that end a stream."""
    error: Callable[[RequestRefused], Body] = lambda refusal: refusal.body
    keep: Callable[[Session, HarnessRequest, CallAnswer, str], Any] | None = None
    """Returns the part of an answer that the session stores for later requests. None: answers are not stored.
    """

    def refused(self, refusal: RequestRefused) -> web.Response:
        """Return the response to a refused request, with a retry hint."""
        headers = {"x-should-retry": "true" if refusal.status == 429 else "false"}
        return web.json_response(self.error(refusal), status=refusal.status, headers=headers)


DONE = b"data: [DONE]\n\n"
APIS = (
    Api(
        "/v1/chat/completions", "chatcmpl-", read_chat, bodies.chat_body, bodies.chat_events,
        start=bodies.chat_start, last=DONE,
    ),
    Api("/v1/completions", "cmpl-", read_text, bodies.text_body, bodies.text_events, last=DONE),
    Api(
        "/v1/messages", "msg_", anthropic.read_messages, anthropic.message_body,
        anthropic.message_events, error=anthropic.error_body,
    ),
    Api(
        "/v1/responses", "resp_", responses.read_responses, response_bodies.response_body,
        response_bodies.response_events, start=response_bodies.response_start,
        keep=response_bodies.kept_response,
    ),
    Api(
        "/inference/v1/generate", "generate-tokens-", generate.read_generate, generate.generate_body,
        generate.generate_events, last=DONE, error=generate.generate_error,
    ),
)  # fmt: skip
"""The OpenAI APIs, Anthropic's messages API, and vLLM's tokens-in, tokens-out API."""


class ServedCall:
    """One client call. An answer that cannot be delivered is withdrawn from the session."""

    def __init__(
        self, api: Api, request: web.Request, session: Session, pending: PendingCall, name: str, size: int
    ) -> None:
        """Serve a pending call.

        Args:
            name: id of the answer.
            size: request size, bytes.
        """
        self._api, self._request, self._session = api, request, session
        self._pending, self._name, self._size = pending, name, size

    async def whole(self) -> web.StreamResponse:
        """Answer with one body."""
        answer = await self._session.answer(self._pending)
        response = web.Response(content_type="application/json", headers=_overridden(self._pending.request))

        async def send() -> None:
            request, renderer = self._pending.request, self._session.renderer
            response.text = await self._written(
                answer, lambda: json.dumps(self._api.whole(request, answer, renderer, self._name))
            )
            await response.prepare(self._request)
            await response.write_eof()

        await self._deliver(answer, send)
        return response

    async def stream(self) -> web.StreamResponse:
        """Answer with a stream: the first event at once, the rest after generation."""
        response = web.StreamResponse(headers=_overridden(self._pending.request))
        response.content_type = "text/event-stream"
        response.headers[hdrs.CACHE_CONTROL] = "no-cache"
        await response.prepare(self._request)
        if (start := self._api.start) is not None:
            event = await off_loop(self._size, lambda: _event(start(self._pending.request, self._name)))
            await response.write(event)
        try:
            answer = await self._session.answer(self._pending)
        except Exception as failed:  # the head is sent, so the error becomes an event
            if not isinstance(failed, RequestRefused):
                _log.exception("session.error path=%s", self._api.path)
                failed = RequestRefused(500, "internal_error", "the call failed, see the worker's log")
            await response.write(_event(self._api.error(failed)))
            await response.write_eof()
            return response

        async def send() -> None:
            request, renderer = self._pending.request, self._session.renderer
            events = await self._written(
                answer, lambda: [*map(_event, self._api.events(request, answer, renderer, self._name))]
            )
            for event in events:
                await response.write(event)
            await response.write(self._api.last)
            await response.write_eof()

        await self._deliver(answer, send)
        return response

    async def _deliver(self, answer: CallAnswer, send: Callable[[], Awaitable[None]]) -> None:
        """Send an answer; withdraw it if the client disconnects before reading it."""
        try:
            if (keep := self._api.keep) is not None:
                request, session = self._pending.request, self._session
                kept = await self._written(answer, lambda: keep(session, request, answer, self._name))
                if kept is not None:
                    session.stored[self._name] = kept
            await send()
        except (ConnectionError, asyncio.CancelledError) as hung_up:
            self._session.withdraw(self._pending, answer)
            self._session.stored.pop(self._name, None)
            if isinstance(hung_up, asyncio.CancelledError):
                raise

    async def _written(self, answer: CallAnswer, make: Callable[[], Made]) -> Made:
        """Return the result of `make`, which formats the answer; large answers are formatted in a thread."""
        tokens = sum(len(each.call.completion.tokens) for each in (answer, *answer.others))
        return await off_loop(self._size + TOKEN * tokens, make)


def _event(body: Body) -> bytes:
    """Return a server-sent event, named after the body's `type` if there is one."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {json.dumps(body)}\n\n".encode()


def _overridden(request: HarnessRequest) -> dict[str, str]:
    return {"x-tether-not-applied": ", ".join(request.overridden)} if request.overridden else {}
