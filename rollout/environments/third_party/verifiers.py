"""Runs each sample in an environment server of the package `verifiers`, over ZeroMQ.

The server (`verifiers.v1.serve`) is a separate process with its own Python environment; this process does not
import the package. Each sample opens a connection and sends three frames (request id, "run", MessagePack).
The replies are frames (request id, kind, MessagePack). Kind "delta" contains changes of a trace; "reply" ends
the episode. A cancelled sample sends "cancel".
"""

import functools
import uuid
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import zmq
import zmq.asyncio
from annotated_types import Interval
from msgspec import UNSET, UnsetType

from protocol.errors import ProtocolError, SettingsError
from protocol.msgpack_limits import check_shape
from rollout.environments.session import SessionEnvironment, SessionOptions, Task
from rollout.off_loop import off_loop

MAX_FRAME = 1 << 28
"""Maximum size of a frame, bytes; a larger frame closes the connection."""
LINGER_MS = 1000
"""Time for sending a cancellation before the socket closes, milliseconds."""
MAX_SHOWN = 300
"""Characters of a server error to show."""
NO_VARIABLE = "TETHER_SESSION_KEY"
"""Name of an unset variable on the server, because each task has its own key. Headers contain the key; the
package overwrites one of them, depending on the API."""
MAX_SOCKETS = 1 << 16
"""Maximum concurrent samples."""


@dataclass(frozen=True, slots=True)
class Options(SessionOptions):
    """Options of `verifiers`."""

    address: str = ""
    """Address of the environment server, such as tcp://127.0.0.1:5000."""
    silence_s: Annotated[float, Interval(ge=0.1, le=1e6)] = 60.0
    """Seconds of silence before the server gets a health request. After twice this time without a message,
    the sample fails."""


class TraceReward(msgspec.Struct, frozen=True):
    """Reward entry of a trace."""

    score: float
    weight: float = 1.0


class TraceError(msgspec.Struct, frozen=True):
    """Error of an episode."""

    type: str = ""
    message: str = ""


class TraceValues(msgspec.Struct, frozen=True):
    """Changed values of a trace."""

    rewards: dict[str, TraceReward | None] | UnsetType = UNSET
    """None: the reward was not computed."""
    ok: bool | UnsetType = UNSET


class TraceDelta(msgspec.Struct, frozen=True):
    """Changes of a trace."""

    trace: str
    discard: bool = False
    """Whether the trace is invalid because another attempt replaces it."""
    values: TraceValues = msgspec.field(default_factory=TraceValues, name="set")
    errors: tuple[TraceError, ...] = ()


class EpisodeHead(msgspec.Struct, frozen=True):
    """Fields of an episode except its traces."""

    ok: bool
    errors: tuple[TraceError, ...] = ()


class TraceSummary(msgspec.Struct, frozen=True):
    """Reference to a trace of the finished episode."""

    id: str


class Reply(msgspec.Struct, frozen=True):
    """Reply to a request."""

    success: bool
    error: str | None = None
    head: EpisodeHead | None = None
    traces: tuple[TraceSummary, ...] = ()


class EpisodeReading:
    """Accumulator of a server's frames about one episode."""

    def __init__(self) -> None:
        self._rewards: dict[str, dict[str, TraceReward | None]] = {}
        self._broken: set[str] = set()
        self._errors: list[TraceError] = []

    def apply(self, delta: TraceDelta) -> None:
        """Apply a change."""
        if delta.discard:
            self._rewards.pop(delta.trace, None)
            self._broken.discard(delta.trace)
            return
        self._errors += delta.errors
        if delta.values.rewards is not UNSET:
            self._rewards[delta.trace] = delta.values.rewards
        if delta.values.ok is True:
            self._broken.discard(delta.trace)
        elif delta.values.ok is False:
            self._broken.add(delta.trace)

    def reward(self, reply: Reply) -> float | None:
        """Return the weighted sum of the rewards of the episode's trace; None if it has no rewards.

        Raises:
            RuntimeError: the episode failed, a reward was not computed, or there is not exactly one trace.
        """
        if not reply.success or reply.head is None:
            raise RuntimeError(f"the environment server failed: {_shown(reply.error or 'without a reason')}")
        errors = [*self._errors, *reply.head.errors]
        why = _shown(f"{errors[-1].type}: {errors[-1].message}") if errors else "without a reason"
        if not reply.head.ok or any(trace.id in self._broken for trace in reply.traces):
            raise RuntimeError(f"the episode failed in the environment server: {why}")
        if len(reply.traces) != 1:
            raise RuntimeError(
                f"the environment server answered with {len(reply.traces)} traces; a sample has one: "
                "serve an environment with one agent"
            )
        rewards = self._rewards.get(reply.traces[0].id, {})
        missing = [name for name, reward in rewards.items() if reward is None]
        if missing:
            raise RuntimeError(f"the environment server did not compute the reward {missing[0]}: {why}")
        return sum(reward.score * reward.weight for reward in rewards.values() if reward) if rewards else None


class EnvironmentServer(SessionEnvironment):
    """Environment that sends each task to an environment server."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if not options.address.startswith(("tcp://", "ipc://")):
            raise SettingsError(
                f"setting environment.options.address: {options.address!r} is not an address of an "
                "environment server, such as tcp://127.0.0.1:5000"
            )
        self._options = options
        self._context: zmq.asyncio.Context | None = None

    async def act(self, task: Task) -> float | None:
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        connection = self._context.socket(zmq.DEALER)
        connection.setsockopt(zmq.LINGER, LINGER_MS)
        connection.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        run = uuid.uuid4().hex.encode()
        is_over = False
        try:
            connection.connect(self._options.address)
            await connection.send_multipart([run, b"run", msgspec.msgpack.encode(run_request(task))])
            reward = await self._read_reward(connection, run)
            is_over = True
            return reward
        finally:
            if not is_over:
                _cancel(connection, run)
            connection.close()

    async def close(self) -> None:
        """Close all connections, and stop the endpoint."""
        if self._context is not None:
            self._context.destroy(linger=LINGER_MS)
            self._context = None
        await super().close()

    async def _read_reward(self, connection: zmq.asyncio.Socket, run: bytes) -> float | None:
        """Return the reward in the run's reply. Raises RuntimeError on silence or an invalid frame."""
        address, silence_s = self._options.address, self._options.silence_s
        reading, is_health_requested = EpisodeReading(), False
        while True:
            if not await connection.poll(int(silence_s * 1000)):
                if is_health_requested:
                    raise RuntimeError(
                        f"the environment server {address} has been silent for {2 * silence_s:g} s: it does "
                        "not run, or speaks another protocol"
                    )
                is_health_requested = True
                await connection.send_multipart([uuid.uuid4().hex.encode(), b"health", b"\x80"])
                continue
            frames = await connection.recv_multipart(zmq.NOBLOCK)
            is_health_requested = False
            try:
                reply_run, kind, data = frames
                if reply_run != run:
                    continue
                message = await off_loop(len(data), functools.partial(_decoded, kind, data))
                if isinstance(message, TraceDelta):
                    reading.apply(message)
                    continue
            except (ValueError, ProtocolError, RecursionError) as error:
                raise RuntimeError(
                    f"the environment server {address} speaks another protocol: {error}"
                ) from None
            return reading.reward(message)


def _decoded(kind: bytes, data: bytes) -> TraceDelta | Reply:
    """Return a decoded frame. Raises ValueError, ProtocolError or RecursionError for garbage."""
    check_shape(data)
    if kind == b"delta":
        return msgspec.msgpack.decode(data, type=TraceDelta)
    return msgspec.msgpack.decode(data, type=Reply)


def run_request(task: Task) -> dict[str, Any]:
    """Return the request for a sample; the prompt's metadata become fields of the task."""
    prompt = task.prompt
    text: Any = prompt.text
    if prompt.messages:
        text = [{"role": role, "content": content} for role, content in prompt.messages]
    return {
        "task_data": {"idx": prompt.index, "prompt": text, **prompt.metadata},
        "client": {
            "type": "eval",
            "base_url": task.url,
            "api_key_var": NO_VARIABLE,
            "headers": {"authorization": f"Bearer {task.key}", "x-api-key": task.key},
        },
        "model": "policy",
        "sampling": {},
    }


def _cancel(connection: zmq.asyncio.Socket, run: bytes) -> None:
    """Send a cancellation for a run whose result is no longer needed."""
    payload = msgspec.msgpack.encode({"request_id": run.decode()})
    plain: zmq.Socket[bytes] = zmq.Socket.shadow(connection.underlying)
    try:
        plain.send_multipart([uuid.uuid4().hex.encode(), b"cancel", payload], zmq.NOBLOCK)
    except zmq.ZMQError:
        return  # not connected, so there is no run to cancel


def _shown(text: str) -> str:
    return " ".join(text.split())[:MAX_SHOWN]


make = EnvironmentServer
