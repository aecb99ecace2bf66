"""Serves model calls to the harnesses of this process, each under a URL with its session's key.

    GET  /s/KEY/v1/models
    POST /s/KEY/v1/chat/completions
    POST /s/KEY/v1/completions
    POST /s/KEY/v1/messages

A key is 192 random bits, and is not answered any more when its session has ended. Nothing else says who may
call, so the address is a loopback one.
"""

import functools
import json
import logging
import secrets
from collections import OrderedDict
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from protocol.errors import SettingsError
from rollout.sessions.refusal import RequestRefused, invalid
from rollout.sessions.served_call import APIS, Api, ServedCall
from rollout.sessions.session import Session

_log = logging.getLogger("tether.sessions")

MAX_ENDED = 10_000
"""Ended sessions whose clients are answered why, the last ones; others are unknown."""
BACKLOG = 4096
"""Connections that may wait to be accepted: all harnesses of a worker may begin at once."""
MODEL = "policy"
"""The model that is listed; requests may name any."""


class SessionEndpoint:
    """HTTP server for the sessions of a process, on a port of its own."""

    def __init__(self, *, body_mb: int = 16, override: bool = False) -> None:
        """Create an endpoint that is not started.

        Args:
            body_mb: largest body of a request, MiB.
            override: whether sampling parameters of requests are not applied; otherwise they are refused.
        """
        self._override = override
        self._max_bytes = body_mb * 2**20
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        app = web.Application(client_max_size=self._max_bytes, middlewares=[_as_errors])
        app.router.add_get("/s/{key}/v1/models", self._serve_models)
        for api in APIS:
            app.router.add_post("/s/{key}/v1" + api.path, functools.partial(self._serve, api))
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        self._address = ""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Bind and serve; port 0 is any free one.

        Raises:
            SettingsError: host or port cannot be bound.
        """
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, backlog=BACKLOG).start()
        except OSError as error:
            await self._runner.cleanup()
            raise SettingsError(
                f"cannot serve sessions on {host}:{port}: {error.strerror or error}; choose another port"
            ) from None
        found = self._runner.addresses[0]
        self._address = f"http://{f'[{found[0]}]' if ':' in found[0] else found[0]}:{found[1]}"

    async def close(self) -> None:
        """End all sessions and stop serving."""
        for key in list(self._sessions):
            self.end(key, "the worker stops")
        await self._runner.cleanup()

    def open(self, session: Session) -> str:
        """Serve a session and return its key."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = session
        return key

    def url(self, key: str) -> str:
        """Return the base URL for clients of the OpenAI API."""
        return f"{self._address}/s/{key}/v1"

    def end(self, key: str, reason: str) -> None:
        """End a session: its calls that run are ended, and its key is refused. Idempotent."""
        session = self._sessions.pop(key, None)
        if session is None:
            return
        session.end(reason)
        self._ended[key] = session.ended
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _session(self, request: web.Request) -> Session:
        key = request.match_info["key"]
        if (session := self._sessions.get(key)) is not None:
            return session
        if (reason := self._ended.get(key)) is not None:
            raise RequestRefused(410, "session_ended", f"the session has ended: {reason}")
        raise RequestRefused(404, "session_not_found", "there is no session with this key")

    async def _serve_models(self, request: web.Request) -> web.Response:
        self._session(request)
        listed = {"id": MODEL, "object": "model", "created": 0, "owned_by": "tether"}
        return web.json_response({"object": "list", "data": [listed]})

    async def _serve(self, api: Api, request: web.Request) -> web.StreamResponse:
        try:
            session = self._session(request)
            asked = api.read(await _json(request, self._max_bytes), override=self._override)
            begun = session.begin(asked)
            call = ServedCall(api, request, session, begun, api.prefix + secrets.token_hex(8))
            return await (call.stream() if asked.stream else call.whole())
        except RequestRefused as refusal:
            return api.refused(refusal)


@web.middleware
async def _as_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer refusals in the shape that clients expect, and say whether to try again."""
    try:
        return await handler(request)
    except RequestRefused as refusal:
        return web.json_response(refusal.body, status=refusal.status, headers={"x-should-retry": "false"})
    except Exception as failed:
        if not isinstance(failed, web.HTTPException):
            _log.exception("session.error path=%s", request.path.partition("/v1")[2])
            failed = web.HTTPInternalServerError()
        code = "not_found" if failed.status == 404 else "refused"
        body = RequestRefused(failed.status, code, failed.reason).body
        return web.json_response(body, status=failed.status, headers={"x-should-retry": "false"})


async def _json(request: web.Request, limit: int) -> Any:
    """Return the body of a request.

    Raises:
        RequestRefused: it is too large or not JSON.
    """
    try:
        if (request.content_length or 0) > limit:
            raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
        body = await request.read()
        found = json.loads(body)
        if b"\\ud" in body.lower():
            json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no text
        return found
    except web.HTTPRequestEntityTooLarge:
        raise RequestRefused(413, "body_too_large", f"the body is over {limit} bytes") from None
    except UnicodeEncodeError:
        raise invalid("the body has a code point that is not text") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from None
