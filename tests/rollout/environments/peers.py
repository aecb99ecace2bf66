"""Servers elsewhere, in this process: each plays `agents.talks` with every task that it gets."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from aiohttp import WSMsgType, web
from openai import OpenAIError

from rollout.config import EnvironmentConfig
from rollout.environments.session import Task
from rollout.prompts.base import Prompt
from tests.rollout.environments.agents import talks

ENDED = {"success": True, "head": {"ok": True, "errors": [], "id": "e"}, "traces": [{"id": "a", "nodes": 1}]}
OPENED = {"trace": "a", "open": {"id": "a"}, "set": {"rewards": {}, "ok": True}}


@contextlib.asynccontextmanager
async def http_peer() -> AsyncIterator[EnvironmentConfig]:
    """Serve by HTTP."""

    async def run(request: web.Request) -> web.Response:
        task = await request.json()
        await talks(Task(task["url"], task["key"], Prompt(task["text"], metadata=task["metadata"])))
        return web.json_response({"reward": None})

    app = web.Application()
    app.router.add_post("/", run)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield EnvironmentConfig("server", {"url": f"http://127.0.0.1:{runner.addresses[0][1]}/"})
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def verifiers_peer() -> AsyncIterator[EnvironmentConfig]:
    """Serve as an environment server of `verifiers` does."""
    context = zmq.asyncio.Context()
    context.setsockopt(zmq.LINGER, 0)
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    running: dict[bytes, asyncio.Task[None]] = {}

    async def play(client: bytes, number: bytes, request: dict[str, Any]) -> None:
        said = ((b"delta", OPENED), (b"reply", ENDED))
        try:
            await talks(Task(request["client"]["base_url"], "none", Prompt(request["task_data"]["prompt"])))
        except OpenAIError as error:
            said = ((b"delta", OPENED), (b"reply", {"success": False, "error": str(error)}))
        for kind, data in said:
            await socket.send_multipart([client, number, kind, msgspec.msgpack.encode(data)])

    async def serve(tasks: asyncio.TaskGroup) -> None:
        while True:
            client, number, method, payload = await socket.recv_multipart()
            request = msgspec.msgpack.decode(payload)
            if method == b"run":
                running[number] = tasks.create_task(play(client, number, request))
            elif method == b"cancel":
                running[request["request_id"].encode()].cancel()

    failed: Exception | None = None  # as it is, not in a group
    try:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(serve(tasks))
            try:
                yield EnvironmentConfig("verifiers", {"address": f"tcp://127.0.0.1:{port}"})
            except Exception as error:
                failed = error
            finally:
                for task in (serving, *running.values()):
                    task.cancel()
    finally:
        context.destroy(linger=0)
    if failed is not None:
        raise failed


@contextlib.asynccontextmanager
async def openenv_peer(
    *answers: Any, heard_pong: asyncio.Event | None = None
) -> AsyncIterator[EnvironmentConfig]:
    """Serve as an OpenEnv server does, with `answers` in turn; without answers, with what was said.

    `heard_pong` is set once a client has answered the ping that follows the first answer.
    """

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket, told = web.WebSocketResponse(autoping=False), iter(answers)
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.PONG and heard_pong is not None:
                heard_pong.set()
                continue
            said = message.json()["data"]
            heard = {"observation": {"heard": str(said), "n": 1}, "reward": None, "done": False}
            answer = next(told, None) if answers else {"type": "observation", "data": heard}
            if answer is None:
                break
            await socket.send_json(answer)
            if heard_pong is not None and not heard_pong.is_set():
                await socket.ping()
        return socket

    app = web.Application()
    app.router.add_get("/ws", serve)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield EnvironmentConfig("openenv", {"url": url, "observation": "heard"})
    finally:
        await runner.cleanup()


PEERS = {"openenv": openenv_peer, "server": http_peer, "verifiers": verifiers_peer}
