"""Injects faults, one context manager for each kind: it begins with the block and is repaired at its end."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tests.trials.chaos.scene import POLL_S, Scene
from tests.trials.chaos.schedule import SERVICES

FIND_S = 30.0
"""How long a process that is just being started again is waited for."""
OFFSETS_S = (-86_400, -30, 30, 86_400, 172_800)


class Missed(Exception):
    """Raised if the fault's target does not exist at the moment."""


async def find(scene: Scene, target: str) -> int:
    """Return the pid of a process, which may be starting at the moment. Raises Missed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIND_S):
            while True:
                pid = scene.pid(target)
                if pid is not None:
                    return pid
                await asyncio.sleep(POLL_S)
    raise Missed(f"{target} did not live within {FIND_S:.0f} s")


def send(pid: int, signum: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


@contextlib.contextmanager
def held(scene: Scene, target: str) -> "contextlib.Generator[None]":
    """Keep `redis` or `up` from being started again. Services are restarted by `tether up`."""
    scene.redis_held += target == "redis"
    scene.up_held += target == "up"
    try:
        yield
    finally:
        scene.redis_held -= target == "redis"
        scene.up_held -= target == "up"


@asynccontextmanager
async def killed(scene: Scene, target: str, rng: random.Random) -> AsyncIterator[None]:
    """Kill a process by SIGKILL."""
    pid = await find(scene, target)
    with held(scene, target):
        send(pid, signal.SIGKILL)
        yield


@asynccontextmanager
async def restarted(scene: Scene, target: str, rng: random.Random) -> AsyncIterator[None]:
    """Send SIGTERM: the process drains, ends and is started again."""
    pid = await find(scene, target)
    with held(scene, target):
        send(pid, signal.SIGTERM)
        yield


@asynccontextmanager
async def stopped(scene: Scene, target: str, rng: random.Random) -> AsyncIterator[None]:
    """Stop a process by SIGSTOP, then continue it by SIGCONT."""
    pid = await find(scene, target)
    send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pid, signal.SIGCONT)


@asynccontextmanager
async def filled(scene: Scene, target: str, rng: random.Random) -> AsyncIterator[None]:
    """Fill a small file system with one file."""
    path = scene.place.mounts[target] / "ballast"
    await asyncio.to_thread(_fill, path)
    try:
        yield
    finally:
        path.unlink()


def _fill(path: "os.PathLike[str]") -> None:
    with contextlib.suppress(OSError), open(path, "wb", buffering=0) as ballast:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while ballast.write(bytes(size)) == size:
                    pass


@asynccontextmanager
async def skewed(scene: Scene, target: str, rng: random.Random) -> AsyncIterator[None]:
    """Shift a wall clock, and set it right again.

    A service that was a spare keeps the clock of that, which all spares of its role share here.
    """
    offset_s, role = rng.choice(OFFSETS_S), target.partition(".")[0]
    clocks = (target, *(f"spare.{name}" for name in SERVICES if name.partition(".")[0] == role))
    for clock in clocks:
        scene.place.set_clock(clock, offset_s)
    try:
        yield
    finally:
        for clock in clocks:
            scene.place.set_clock(clock, 0)


def weathered(kind: str) -> "Begin":
    """Apply a fault to a link."""

    @asynccontextmanager
    async def begun(scene: Scene, target: str, rng: random.Random) -> AsyncIterator[None]:
        weather = scene.links[target]
        weather.begin(kind)
        try:
            yield
        finally:
            weather.end(kind)

    return begun


Begin = Callable[[Scene, str, random.Random], AbstractAsyncContextManager[None]]
FAULTS: dict[str, Begin] = {
    "kill": killed,
    "restart": restarted,
    "stop": stopped,
    "fill": filled,
    "skew": skewed,
    **{kind: weathered(kind) for kind in ("cut", "stall", "mute", "slow", "corrupt", "truncate")},
}
