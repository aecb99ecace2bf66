"""Provides messages, a registry in a dict, raw ZeroMQ peers and a receiver process to the bus tests."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import zmq
import zmq.asyncio

from protocol.codec import decode, encode
from protocol.messages import AnyMessage, Hello, ScoreFailure
from protocol.topics import SCORED, Topic
from services.bus.config import BusConfig
from services.bus.receiver import Receiver
from services.bus.sender import Sender

ROOT = Path(__file__).parents[3]
RUN = "run-1"
QUICK = BusConfig(heartbeat_s=0.05, peer_timeout_s=20.0)
DEADLINE_S = 60.0
"""No test waits for longer: what does not happen by then is a failure."""


def score(group: int, error: str = "boom") -> ScoreFailure:
    return ScoreFailure(group=group, token="t", verifier="v", error=error)


def frame(message: AnyMessage, id: str = "", run: str = RUN) -> bytes:
    return encode(message, run=run, id=id)


def windowed(window: int) -> Topic:
    return replace(SCORED, window=window)


class Registry(dict[str, str]):
    """Receiver incarnation -> endpoint; calling it is what `discover` expects."""

    async def __call__(self) -> Mapping[str, str]:
        return dict(self)


def receiver(incarnation: str = "ingest.1", topic: Topic = SCORED, config: BusConfig = QUICK) -> Receiver:
    return Receiver(topic, run=RUN, incarnation=incarnation, config=config)


def sender(
    discover: Callable[[], Awaitable[Mapping[str, str]]],
    incarnation: str = "reward.1",
    topic: Topic = SCORED,
    config: BusConfig = QUICK,
) -> Sender:
    return Sender(topic, run=RUN, incarnation=incarnation, role="reward", config=config, discover=discover)


async def eventually(condition: Callable[[], bool]) -> None:
    """Let the loop run until `condition()` holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - conditions span sockets and processes
            await asyncio.sleep(0.002)


async def acknowledge(inbox: Receiver, groups: list[int]) -> None:
    """Acknowledge every message and note its group, until cancelled."""
    while True:
        delivery = await inbox.receive()
        assert isinstance(delivery.message, ScoreFailure)
        groups.append(delivery.message.group)
        inbox.ack(delivery)


@asynccontextmanager
async def background(*loops: Awaitable[None]) -> AsyncIterator[None]:
    """Run `loops` beside the block and cancel them at its end."""

    async def ended(loop: Awaitable[None]) -> None:
        await loop

    async with asyncio.timeout(DEADLINE_S):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ended(loop)) for loop in loops]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()


class Raw:
    """Bare DEALER (connects) or ROUTER (binds), to send what our own classes never send."""

    def __init__(self, endpoint: str = "", hwm: int = 1000) -> None:
        self._context = zmq.asyncio.Context()
        self._context.setsockopt(zmq.LINGER, 0)  # see `make_context`
        self.socket = self._context.socket(zmq.DEALER if endpoint else zmq.ROUTER)
        self.socket.set_hwm(hwm)
        self.endpoint = endpoint
        if endpoint:
            self.socket.connect(endpoint)
        else:
            self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    async def __aenter__(self) -> "Raw":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(0)

    async def say(self, *frames: bytes) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.socket.send_multipart(list(frames))

    async def hello(self, name: str = "raw.1") -> AnyMessage:
        await self.say(frame(Hello(sender=name, role="reward")))
        return await self.hear()

    async def hear(self) -> AnyMessage:
        return (await self.hear_from())[1]

    async def hear_from(self) -> tuple[list[bytes], AnyMessage]:
        async with asyncio.timeout(DEADLINE_S):
            *address, last = await self.socket.recv_multipart()
        return address, decode(last)[1]

    async def hear_news_from(self) -> AnyMessage:
        """Return the next message that is not a Hello, which senders repeat."""
        while isinstance(message := (await self.hear_from())[1], Hello):
            pass
        return message

    async def hear_of(self, kind: type[AnyMessage]) -> AnyMessage:
        """Return the next message of a kind; others are skipped."""
        while not isinstance(message := await self.hear(), kind):
            pass
        return message


@asynccontextmanager
async def holder(
    incarnation: str,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, asyncio.StreamReader]]:
    """Start another process with a receiver that holds what it gets.

    Yields (process, endpoint, its output: a line per message).
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.services.bus.harness",
        incarnation,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            endpoint = (await process.stdout.readline()).decode().strip()
        yield process, endpoint, process.stdout
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.communicate()  # what is left in its pipe too: else the pipe may outlive the loop


async def outcome(call: Awaitable[object]) -> Exception | None:
    """Return the error of a call, None if there is none."""
    try:
        await call
    except Exception as error:
        return error
    return None


async def _hold(incarnation: str) -> None:
    async with receiver(incarnation) as inbox:
        print(inbox.endpoint, flush=True)
        while True:
            print((await inbox.receive()).envelope.id, flush=True)


if __name__ == "__main__":
    asyncio.run(_hold(sys.argv[1]))
