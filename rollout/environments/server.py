"""Sends each sample's task to a user's server in one HTTP request; the reply contains the outcome.

    POST {"url": ..., "key": ..., "text": ..., "messages": [...], "metadata": {...}}
    ->   {"reward": 1.0}

The server calls the model at the URL in the request, and replies at the end of its episode. Any status but
200 fails the sample. Cancelling a sample closes its connection.
"""

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import msgspec

from protocol.errors import SettingsError
from rollout.environments.session import SessionEnvironment, SessionOptions, Task

MAX_ANSWER = 2**20
"""Maximum size of a reply, bytes."""
MAX_SHOWN = 300
"""Characters of an invalid reply to show in errors."""
CONNECT_S = 10.0
"""Timeout for connecting, seconds; `environment.episode_s` limits the reply."""


@dataclass(frozen=True, slots=True)
class Options(SessionOptions):
    """Options of `server`."""

    url: str = ""
    """URL to which tasks are sent by POST, such as http://127.0.0.1:9000/run."""


class ServerAnswer(msgspec.Struct, frozen=True):
    """Reply of the server."""

    reward: float | None
    """None: verifiers score the model's last answer."""


class Server(SessionEnvironment):
    """Environment that sends each task to a server."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        parts = urlsplit(options.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(
                f"setting environment.options.url: {options.url!r} is not an address, such as "
                "http://127.0.0.1:9000/run"
            )
        self._url = options.url
        self._client: aiohttp.ClientSession | None = None

    async def act(self, task: Task) -> float | None:
        if self._client is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            # one connection per sample: the server may close an idle connection just as it is reused
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._client = aiohttp.ClientSession(timeout=limits, connector=connector)
        given = {"url": task.url, "key": task.key, **task.as_json()}
        try:
            async with self._client.post(self._url, json=given, allow_redirects=False) as response:
                answer = await _bounded(response)
        except (aiohttp.ClientError, OSError) as error:
            raise RuntimeError(f"the server {self._url} did not answer: {error}") from None
        if response.status != 200:
            raise RuntimeError(f"the server {self._url} answered {response.status}: {_shown(answer)}")
        try:
            return msgspec.json.decode(answer, type=ServerAnswer).reward
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(
                f'the server {self._url} answered no {{"reward": NUMBER}} ({error}): {_shown(answer)}'
            ) from None

    async def close(self) -> None:
        """Close all connections, and stop the endpoint."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        await super().close()


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of a reply. Raises ValueError if it exceeds `MAX_ANSWER` bytes."""
    try:
        await response.content.readexactly(MAX_ANSWER + 1)
    except asyncio.IncompleteReadError as end:
        return end.partial
    raise ValueError(f"the server answered more than {MAX_ANSWER} bytes")


def _shown(answer: bytes) -> str:
    return answer[:MAX_SHOWN].decode(errors="replace").strip()


make = Server
