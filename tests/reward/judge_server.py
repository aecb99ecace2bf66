"""A server that speaks the chat completions protocol, and misbehaves on request."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Reply = Callable[[dict[str, Any]], "str | web.Response"]
"""What is answered to a request: the text of a completion, or any response."""
HANG = "hang"
"""Text that stands for no answer at all."""


@dataclass
class JudgeServer:
    """What a test sees of it."""

    url: str
    reply: Reply
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    meeting: asyncio.Barrier | None = None
    """Where all requests wait until there are enough of them."""

    def last_content(self) -> str:
        """Return the last message of the last request."""
        return str(self.requests[-1]["messages"][-1]["content"])


def completion(text: Any, finish_reason: str | None = "stop") -> dict[str, Any]:
    """Return the body of an answer."""
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "judge",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": finish_reason,
            }
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }


def asked(request: dict[str, Any]) -> str:
    """Return the question of a request."""
    return str(request["messages"][-1]["content"])


@contextlib.asynccontextmanager
async def judge_server(reply: Reply) -> AsyncIterator[JudgeServer]:
    """Serve on a free port of the loopback."""
    server = JudgeServer("", reply)

    async def answer(request: web.Request) -> web.Response:
        server.requests.append(json.loads(await request.read()))
        server.headers.append(dict(request.headers))
        server.running += 1
        server.most_running = max(server.most_running, server.running)
        try:
            if server.meeting is not None:
                await server.meeting.wait()
            given = server.reply(server.requests[-1])
            if isinstance(given, web.Response):
                return given
            if given == HANG:
                await asyncio.Event().wait()
            return web.json_response(completion(given))
        finally:
            server.running -= 1

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/v1"
    try:
        yield server
    finally:
        await runner.cleanup()
