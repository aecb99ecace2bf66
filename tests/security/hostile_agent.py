"""An agent that attacks the endpoint before it works."""

import asyncio
import contextlib
import http.client
from collections.abc import AsyncIterator
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp
from openai import AsyncOpenAI

from rollout.environments.session import Task
from tests.security.hostile_requests import HOSTILE

PATHS = ("v1/chat/completions", "v1/completions", "v1/responses", "v1/messages", "inference/v1/generate")
TOO_LONG = ("a long message", "many messages", "many tools", "many lists", "a prompt of many tokens")
CLEAN = {400, 404, 405, 413}
"""Statuses of refusals."""


async def attacks(task: Task) -> float:
    """Sends what is wrong, too long or 100 MB, leaves connections open, then asks once as it should."""
    own = task.url.removesuffix("/v1")
    silent = [await asyncio.open_connection(*_address(task.url)) for _ in range(4)]
    async with aiohttp.ClientSession() as http:
        for path in PATHS:
            for url in (f"{own}/{path}", f"{own[:-1]}/{path}"):
                for body in (b"{", b"\xff" * 1000, b'{"model": []}', _endless()):
                    with suppress(aiohttp.ClientOSError):  # it hangs up before all is sent
                        async with http.post(url, data=body) as response:
                            if response.status not in CLEAN or not (await response.json())["error"]:
                                raise AssertionError(f"{path} answers {response.status}")
        for what in TOO_LONG:
            path, make = HOSTILE[what]
            status = await asyncio.to_thread(lambda path=path, make=make: post(f"{own}/{path}", make(10**6)))
            if status not in CLEAN:
                raise AssertionError(f"{what} is answered {status}")
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await http.post(f"{own}/v1/completions", json={"prompt": "x"})
    async with AsyncOpenAI(base_url=task.url, api_key="another") as client:
        await client.chat.completions.create(model="policy", messages=task.as_json()["messages"])
    for _, writer in silent:
        writer.close()
    return 1.0


def post(url: str, body: bytes) -> int:
    """Send a body, and return the status of the answer; a result of a tool is put."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=120)
    with contextlib.closing(connection):
        with suppress(ConnectionError):  # it hangs up before all is sent
            connection.request("PUT" if "/results/" in url else "POST", address.path, body)
        answer = connection.getresponse()
        answer.read()
        return answer.status


async def _endless() -> AsyncIterator[bytes]:
    for _ in range(100):
        yield b" " * 2**20


def _address(url: str) -> tuple[str, int]:
    host, _, port = url.split("/")[2].partition(":")
    return host, int(port)
