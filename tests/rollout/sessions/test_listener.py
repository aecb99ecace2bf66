"""Strangers, large and slow requests at the endpoint get clean refusals, and service continues."""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import suppress

import aiohttp
import pytest

from tests.rollout.sessions.serving import USER, served

APIS = {
    "chat/completions": lambda body: body["error"]["code"],
    "completions": lambda body: body["error"]["code"],
    "responses": lambda body: body["error"]["code"],
    "messages": lambda body: body["error"]["type"],
    "../inference/v1/generate": lambda body: body["error"]["type"],
}


async def test_a_malformed_request_leaves_no_line_and_no_key(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as (client, _, _, key):
        for text in (f"GET /s/{key}/v1/models HTTP/1.1\nHost: x\n\n", f"GET /s/{key} \x00 x\r\n\r\n"):
            reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            writer.write(text.encode())
            async with asyncio.timeout(60):
                assert (await reader.read(12)).startswith(b"HTTP/1.0 400")
            writer.close()
    assert key not in caplog.text
    assert caplog.records == []


@pytest.mark.parametrize("path", APIS)
async def test_every_api_refuses_strangers_and_large_bodies_in_its_own_shape(path: str) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 2**20

    async with served() as (_, session, endpoint, key), aiohttp.ClientSession() as http:
        own = endpoint.url(key)
        for url, body, status, code in (
            (endpoint.url("guess"), b"{}", 404, ("session_not_found", "not_found_error")),
            (endpoint.url("guess"), endless(), 404, ("session_not_found", "not_found_error")),
            (own, io.BytesIO(b" " * (17 * 2**20)), 413, ("body_too_large", "request_too_large")),
            (own, endless(), 413, ("body_too_large", "request_too_large")),
            (own, b"{", 400, ("invalid_json", "invalid_request_error", "BadRequestError")),
        ):
            with suppress(aiohttp.ClientOSError):  # the connection is closed before all is sent
                async with http.post(f"{url}/{path}", data=body) as response:
                    assert response.status == status
                    assert APIS[path](await response.json()) in code
        endpoint.end(key, "the episode is over")
        async with http.post(f"{own}/{path}", data=b"{}") as response:
            assert response.status == 410
        assert session.tree.calls == []


async def test_slow_and_too_many_connections_are_closed_and_service_continues() -> None:
    async with served(max_connections=3, header_s=0.2, body_s=0.2) as (client, session, endpoint, key):
        host, port = endpoint.url(key).split("/")[2].split(":")
        silent, writing = await asyncio.open_connection(host, int(port))
        writing.write(b"POST /s/")
        slow, writes = await asyncio.open_connection(host, int(port))
        path = endpoint.url(key).partition(port)[2]
        writes.write(f"POST {path}/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 90\r\n\r\n{{".encode())
        assert await silent.read() == b""
        answer = await slow.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"did not come within 0.2 s" in answer
        for writer in (writing, writes):
            writer.close()
        await client.chat.completions.create(model="m", messages=[USER])
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
        refused = await idle[-1][0].read()
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"3 connections are open" in refused
        for _, writer in idle:
            writer.close()
        assert len(session.tree.calls) == 1
