"""Plays an environment of an OpenEnv server; each model turn is an action.

An episode is a WebSocket connection to `URL/ws`. {"type": "reset", "data": ...} and {"type": "step", "data":
ACTION} are answered by {"type": "observation", "data": {"observation", "reward", "done"}}. The prompt's
metadata `reset` contains the reset arguments. The prompt is the first observation; this module requests it
from a server:

    python -m rollout.environments.third_party.openenv URL PROMPTS.jsonl COUNT [FIELD]
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
from annotated_types import Interval
from yarl import URL

from protocol.errors import SettingsError
from protocol.host.atomic_file import check_absent, write_atomically
from rollout.command_line import errors_as_exit_code
from rollout.environments.episode import Episode, EpisodeEnvironment

MAX_ANSWER = 16 << 20
"""Maximum size of a reply, bytes."""
WRONG_ACTION = "VALIDATION_ERROR"
"""Error code of an invalid action of the model."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `openenv`."""

    url: str = ""
    """URL of the server, such as http://127.0.0.1:8000."""
    action: str = "message"
    """Action field that gets the model's turn. Empty: the turn itself is the action, as a JSON object."""
    observation: str = ""
    """Observation field shown to the model. Empty: the whole observation as JSON."""
    turn_tokens: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """Maximum sampled tokens per turn. 0: `sampling.max_tokens`."""
    step_s: Annotated[float, Interval(gt=0, le=1e6)] = 60.0
    """Timeout of a reset or step, seconds; a timeout fails the episode."""


class OpenEnvSession:
    """Connection to a server, which holds one environment."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, options: Options) -> None:
        self._socket, self._options = socket, options
        self._answers: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue(1)
        """Messages of the server that `request` has not read yet."""

    async def read_loop(self) -> None:
        """Read until the connection closes. aiohttp answers the server's pings only during a read."""
        while not self._socket.closed:
            await self._answers.put(await self._socket.receive())

    async def request(self, kind: str, data: dict[str, Any]) -> tuple[str, float | None, bool]:
        """Send a message; return (observation text, reward, whether the episode is over).

        Raises:
            ValueError: the server rejects the action; the message contains its reason.
            RuntimeError: the server does not reply, or replies with another error or without an observation.
            SettingsError: the observation lacks the configured field.
        """
        url = self._options.url
        try:
            async with asyncio.timeout(self._options.step_s):
                await self._socket.send_json({"type": kind, "data": data})
                answer = json.loads((await self._answers.get()).data)
        except TimeoutError:
            raise RuntimeError(f"the OpenEnv server {url}: no answer to {kind} in time") from None
        except (TypeError, ValueError, RecursionError, OSError, aiohttp.ClientError):
            raise RuntimeError(f"the OpenEnv server {url} closed, or did not say JSON") from None
        match answer:
            case {
                "type": "observation",
                "data": {
                    "observation": dict(observation),
                    "reward": int() | float() | None as reward,
                    "done": bool(done),
                },
            }:
                return _shown(observation, self._options.observation), reward, done
            case {"type": "error", "data": {"code": code} as error} if code == WRONG_ACTION:
                raise ValueError(f"the OpenEnv server {url}: {json.dumps(error)[:300]}")
        raise RuntimeError(f"the OpenEnv server {url} sent no observation: {json.dumps(answer)[:300]}")


class OpenEnv(EpisodeEnvironment):
    """Environment `openenv`."""

    def __init__(self, options: Options) -> None:
        if URL(options.url).scheme not in ("http", "https"):
            raise SettingsError(
                f"setting environment.options.url: {options.url!r} is not an address, such as "
                "http://127.0.0.1:8000"
            )
        self._options = options
        super().__init__(self._play)

    async def _play(self, episode: Episode) -> float | None:
        """Play one episode; return the sum of its rewards, or None if it had none."""
        async with connected(self._options) as session:
            _, reward, done = await session.request("reset", dict(episode.metadata.get("reset", {})))
            while not done:
                episode.reward = _sum(episode.reward, reward)
                turn = await episode.generate(self._options.turn_tokens or None)
                shown, reward, done = await self._step(session, turn)
                episode.insert(shown)
            return _sum(episode.reward, reward)

    async def _step(self, session: OpenEnvSession, turn: str) -> tuple[str, float | None, bool]:
        """Execute a model turn as an action; invalid actions return the error as an observation."""
        try:
            action = {self._options.action: turn} if self._options.action else json.loads(turn)
            if isinstance(action, dict):
                return await session.request("step", action)
        except SettingsError:
            raise
        except (ValueError, RecursionError) as error:
            return f"error: {error}", None, False
        return "error: an action is a JSON object", None, False


@asynccontextmanager
async def connected(options: Options) -> AsyncIterator[OpenEnvSession]:
    """Open a connection for one episode.

    Raises:
        RuntimeError: the server does not reply.
    """
    async with aiohttp.ClientSession() as client:
        try:
            async with asyncio.timeout(options.step_s):
                socket = await client.ws_connect(URL(options.url) / "ws", max_msg_size=MAX_ANSWER)
        except (TimeoutError, OSError, ValueError, aiohttp.ClientError) as error:
            raise RuntimeError(f"the OpenEnv server {options.url}: {str(error)[:300]}") from None
        async with socket:
            session = OpenEnvSession(socket, options)
            # not in a TaskGroup, which would wrap the episode's errors in an ExceptionGroup
            reading = asyncio.get_running_loop().create_task(session.read_loop(), name="openenv.read")
            try:
                yield session
            finally:
                reading.cancel()
                await asyncio.wait([reading])


def _shown(observation: dict[str, Any], field: str) -> str:
    if not field:
        return json.dumps(observation)
    if field not in observation:
        raise SettingsError(
            f"setting environment.options.observation: an observation has no {field!r}, but "
            f"{', '.join(observation)}"
        )
    return str(observation[field])


def _sum(before: float | None, reward: float | None) -> float | None:
    return before if reward is None else (before or 0.0) + reward


async def write_prompts(url: str, path: Path, count: int, field: str) -> None:
    """Write the first observation for each seed below `count` as a prompt.

    Raises:
        SettingsError: the file exists, or an observation lacks the field.
        RuntimeError: the server does not reply, or rejects a reset.
    """
    check_absent(path)
    options, lines = Options(url, observation=field), []
    for seed in range(count):
        async with connected(options) as session:
            try:
                shown, _, _ = await session.request("reset", {"seed": seed})
            except SettingsError:
                raise
            except ValueError as error:
                raise RuntimeError(str(error)) from None
        lines.append(json.dumps({"prompt": shown, "reset": {"seed": seed}}))
    write_atomically(path, "".join(f"{line}\n" for line in lines).encode())


@errors_as_exit_code
def main(arguments: list[str]) -> int:
    """Run `python -m rollout.environments.third_party.openenv`; return the exit code."""
    match arguments:
        case [url, path, count, *field] if count.isdecimal() and int(count) and len(field) < 2:
            asyncio.run(write_prompts(url, Path(path), int(count), "".join(field)))
            return 0
    print(__doc__, file=sys.stderr)
    return 2


make = OpenEnv

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
