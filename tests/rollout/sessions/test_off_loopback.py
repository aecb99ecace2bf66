"""Official clients and strangers at an endpoint that other machines reach, over TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from protocol.network.certificates import create_certificate
from rollout.config import EnvironmentConfig
from rollout.sessions.endpoint import SessionEndpoint
from rollout.sessions.session import Session
from tests.rollout.sessions.serving import HELLO, USER, served

FAR = "127.0.0.2"
"""An address of this machine under which a loopback endpoint is not reached."""


@dataclass
class Far:
    """Place of a harness on another machine."""

    session: Session
    endpoint: SessionEndpoint
    key: str
    cert_file: Path

    @property
    def url(self) -> str:
        return self.endpoint.url(self.key)

    @property
    def token(self) -> str:
        return self.endpoint.token(self.key)

    @property
    def trusted(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.cert_file))

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(verify=self.trusted)

    def openai(self, token: str = "") -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(verify=self.trusted)
        return openai.AsyncOpenAI(base_url=self.url, api_key=token or self.token, http_client=http)

    def anthropic(self, **key: Any) -> anthropic.AsyncAnthropic:
        url = self.url.removesuffix("/v1")
        http = anthropic.DefaultAsyncHttpxClient(verify=self.trusted)
        return anthropic.AsyncAnthropic(base_url=url, http_client=http, **key)


@asynccontextmanager
async def far(tmp_path: Path, **options: Any) -> AsyncIterator[Far]:
    cert_file, key_file = create_certificate(tmp_path / "keys", [FAR])
    config = EnvironmentConfig(
        host="0.0.0.0", cert_file=str(cert_file), key_file=str(key_file), advertise=f"https://{FAR}:{{port}}"
    )
    async with served(config=config, **options) as (_, session, endpoint, key):
        yield Far(session, endpoint, key, cert_file)


async def test_official_clients_call_over_tls_with_the_key_of_the_task(tmp_path: Path) -> None:
    async with far(tmp_path) as place:
        assert place.url.startswith(f"https://{FAR}:")
        async with place.openai() as client:
            answer = await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
            assert answer.choices[0].message.content == HELLO
            stream = await client.chat.completions.create(model="m", messages=[USER], stream=True)  # type: ignore[list-item]
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == HELLO
        for key in ({"api_key": place.token}, {"auth_token": place.token}):
            async with place.anthropic(**key) as client:
                said = await client.messages.create(model="m", max_tokens=50, messages=[USER])  # type: ignore[list-item]
                assert said.content[0].text == HELLO  # type: ignore[union-attr]
        assert len(place.session.tree.calls) == 4


async def test_a_request_without_the_token_learns_of_no_session(tmp_path: Path) -> None:
    async with far(tmp_path) as place:
        for token in ("wrong", place.key, place.endpoint.token("other")):
            async with place.openai(token) as client:
                with pytest.raises(openai.AuthenticationError, match="not the key of the task"):
                    await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
            async with place.anthropic(api_key=token) as other:
                with pytest.raises(anthropic.AuthenticationError, match="not the key of the task"):
                    await other.messages.create(model="m", max_tokens=5, messages=[USER])  # type: ignore[list-item]
        async with place.http() as http:
            refused = [
                await http.request(method, f"{url}/{path}")
                for url in (place.url, place.endpoint.url("guess"))
                for method, path in (("GET", "models"), ("GET", "results/a"), ("POST", "chat/completions"))
            ]
            assert {(answer.status_code, answer.text) for answer in refused} == {(401, refused[0].text)}
            place.endpoint.end(place.key, "its episode is over")
            ended = await http.get(f"{place.url}/models")
            assert (ended.status_code, ended.text) == (401, refused[0].text)
            after = await http.get(f"{place.url}/models", headers={"x-api-key": place.token})
            assert after.status_code == 410
            assert "its episode is over" in after.text
        assert place.session.tree.calls == []


async def test_a_client_without_tls_or_with_an_old_one_gets_no_answer(tmp_path: Path) -> None:
    async with far(tmp_path) as place:
        port = httpx.URL(place.url).port
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"http://{FAR}:{port}/s/{place.key}/v1/models")
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await http.get(f"{place.url}/models")
        old = ssl.create_default_context(cafile=str(place.cert_file))
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        async with httpx.AsyncClient(verify=old) as http:
            with pytest.raises(httpx.ConnectError):
                await http.get(f"{place.url}/models")


async def test_silent_slow_and_too_many_connections_are_closed_as_on_loopback(tmp_path: Path) -> None:
    async with far(tmp_path, max_connections=3, header_s=0.4, body_s=0.2) as place, place.http() as http:
        port = httpx.URL(place.url).port
        for tls in (None, place.trusted):  # never begins its handshake; never sends a head
            silent, writer = await asyncio.open_connection(FAR, port, ssl=tls)
            assert await silent.read() == b""
            writer.close()
        slow, writer = await asyncio.open_connection(FAR, port, ssl=place.trusted)
        path = httpx.URL(place.url).path
        head = f"POST {path}/messages HTTP/1.1\r\nHost: x\r\nX-Api-Key: {place.token}\r\n"
        writer.write(f"{head}Content-Length: 90\r\n\r\n{{".encode())
        assert (await slow.readuntil(b"}}")).startswith(b"HTTP/1.1 408 ")
        writer.close()
        many = [await asyncio.open_connection(FAR, port) for _ in range(3)]
        assert (await http.get(f"{place.url}/models")).status_code == 503
        for reader, writer in many:
            assert await reader.read() == b""
            writer.close()
        async with place.openai() as client:
            await client.chat.completions.create(model="m", messages=[USER])  # type: ignore[list-item]
        assert len(place.session.tree.calls) == 1


async def test_workers_of_a_host_take_one_port_each_of_a_range() -> None:
    async with served() as (_, _, first, key):
        port = int(httpx.URL(first.url(key)).port or 0)
        config = EnvironmentConfig(port=port, ports=50)
        async with served(config=config) as (_, _, second, other):
            assert port < int(httpx.URL(second.url(other)).port or 0) < port + 50


async def test_an_advertised_endpoint_needs_the_token_on_loopback_too() -> None:
    """A tunnel leads from elsewhere to loopback."""
    config = EnvironmentConfig(advertise="https://tunnel.example/a")
    async with served(config=config) as (_, _, endpoint, key), httpx.AsyncClient() as http:
        assert endpoint.url(key) == f"https://tunnel.example/a/s/{key}/v1"
        local = f"{endpoint.bound}/s/{key}/v1/models"
        assert (await http.get(local)).status_code == 401
        headers = {"authorization": f"bearer {endpoint.token(key)}"}
        assert (await http.get(local, headers=headers)).status_code == 200
