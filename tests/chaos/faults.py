"""Injects faults, one context manager for each kind: the fault begins with the block and is repaired at its
end."""

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tests.chaos.scene import POLL_S, Scene

FIND_S = 30.0
"""How long a process that is just being started again is waited for."""
OFFSETS_S = (-86_400, -30, 30, 86_400)


class Missed(Exception):
    """There was nobody to do it to."""


async def find(scene: Scene, target: str) -> int:
    """Pid of a process, which may be starting at the moment. Raises Missed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FIND_S):
            while True:
                pid = scene.pid(target)
                if pid is not None:
                    return pid
                await asyncio.sleep(POLL_S)
    raise Missed(f"{target} did not live within {FIND_S:.0f} s")


def send(pid: int, signum: signal.Signals) -> None:
    """Send a signal to a process that may have exited."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


@contextlib.contextmanager
def held(scene: Scene, target: str) -> "contextlib.Generator[None]":
    """Keep `redis` or `up` from being started again. The services of a run are `tether up`'s business."""
    scene.redis_held += target == "redis"
    scene.up_held += target == "up"
    try:
        yield
    finally:
        scene.redis_held -= target == "redis"
        scene.up_held -= target == "up"


@asynccontextmanager
async def killed(scene: Scene, target: str, rng: random.Random) -> AsyncIterator[None]:
    """kill -9."""
    pid = await find(scene, target)
    with held(scene, target):
        send(pid, signal.SIGKILL)
        yield


@asynccontextmanager
async def restarted(scene: Scene, target: str, rng: random.Random) -> AsyncIterator[None]:
    """SIGTERM: it drains, ends and is started again."""
    pid = await find(scene, target)
    with held(scene, target):
        send(pid, signal.SIGTERM)
        yield


@asynccontextmanager
async def stopped(scene: Scene, target: str, rng: random.Random) -> AsyncIterator[None]:
    """SIGSTOP, then SIGCONT."""
    pid = await find(scene, target)
    send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pid, signal.SIGCONT)


@asynccontextmanager
async def filled(scene: Scene, target: str, rng: random.Random) -> AsyncIterator[None]:
    """A file that takes all space of a small file system."""
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
    """A wall clock that is off. That of Redis jumps ahead and stays there: it is the run's clock."""
    offset_s = rng.choice(OFFSETS_S)
    if target == "redis":
        scene.redis_ahead_s += abs(offset_s)
        scene.place.set_clock(target, scene.redis_ahead_s)
        yield
        return
    scene.place.set_clock(target, offset_s)
    try:
        yield
    finally:
        scene.place.set_clock(target, 0)


def weathered(kind: str) -> "Begin":
    """A fault of a link's weather."""

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
