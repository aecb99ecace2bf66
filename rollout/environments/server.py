"""Has a server of the user's run each sample: one HTTP request with the task, answered by the outcome.

    POST {"url": ..., "key": ..., "text": ..., "messages": [...], "metadata": {...}}
    ->   {"reward": 1.0}

The server talks to the model by the URL in the request, and answers when its episode is over. Any status but
200 fails the sample. A sample that is cancelled closes its connection.
"""

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

import aiohttp
import msgspec

from protocol.errors import SettingsError
from rollout.environments.session import SessionEnvironment, SessionOptions, Task

MAX_ANSWER = 2**20
"""Bytes of an answer."""
MAX_SHOWN = 300
"""Characters of a wrong answer that are shown."""
CONNECT_S = 10.0
"""Time limit for a connection, seconds; `environment.episode_s` limits the answer."""


@dataclass(frozen=True, slots=True)
class Options(SessionOptions):
    """Options of `server`."""

    url: str = ""
    """Where a task is sent by POST, such as http://127.0.0.1:9000/run."""


class ServerAnswer(msgspec.Struct, frozen=True):
    """What the server says of an episode."""

    reward: float | None
    """None: verifiers score the last answer of the model."""


class Server(SessionEnvironment):
    """Sends each task to a server."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        parts = urlsplit(options.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(
                f"setting environment.options.url: {options.url!r} is no address, such as "
                "http://127.0.0.1:9000/run"
            )
        self._url = options.url
        self._client: aiohttp.ClientSession | None = None

    async def act(self, task: Task) -> float | None:
        if self._client is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            # a connection for each sample: the server may close one that is idle just as it is used again
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
        """Close connections, and stop serving."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        await super().close()


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """Return an answer. Raises ValueError if it has more than `MAX_ANSWER` bytes."""
    try:
        await response.content.readexactly(MAX_ANSWER + 1)
    except asyncio.IncompleteReadError as end:
        return end.partial
    raise ValueError(f"the server answered more than {MAX_ANSWER} bytes")


def _shown(answer: bytes) -> str:
    return answer[:MAX_SHOWN].decode(errors="replace").strip()


make = Server
