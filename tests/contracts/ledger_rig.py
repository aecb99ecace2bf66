"""A ledger under test, with what only a test may do to it: make a lease expire, let its wall clock jump."""

import itertools
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol

import pytest
import redis as redis_sync

from protocol.errors import Reason, Refused
from protocol.staleness import Bound, Policy
from services.ledger.interface import Lease, Ledger, RunSpec, TakenBatch
from services.ledger.redis import scripts
from services.ledger.redis.ledger import RedisLedger
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.contracts.memory_ledger.run_clock import RunClock

_runs = itertools.count()
SCRIPTS = sorted(path.stem for path in (Path(scripts.__file__).parent / "lua").glob("[!_]*.lua"))
"""Names of all Lua scripts."""


def padded(group: int) -> str:
    """A group id as a zset member or hash field."""
    return f"{group:012d}"


def new_run() -> str:
    """A run name that no other test uses."""
    return f"test-{next(_runs)}"


class Rig(Protocol):
    """A ledger and its trapdoor."""

    ledger: Ledger
    run: str

    def expire(self, group: int) -> None:
        """Put the end of the group's lease into the past."""

    def jump(self, ms: int) -> None:
        """Let the wall clock move by so much between two calls, as the run's clock sees it."""

    async def close(self) -> None: ...


class MemoryRig:
    def __init__(self, **options: Any) -> None:
        self.run = new_run()
        self.ledger = MemoryLedger(**options)

    def expire(self, group: int) -> None:
        self.ledger.run_state.groups[group].expires_ms = 0

    def jump(self, ms: int) -> None:
        assert isinstance(self.ledger.clock, RunClock)
        self.ledger.clock.wall_reading -= ms

    async def close(self) -> None:
        await self.ledger.close()


class RedisRig:
    def __init__(self, url: str, ledger: RedisLedger) -> None:
        self.run = ledger.run
        self.ledger = ledger
        self.server = redis_sync.Redis.from_url(url)

    @classmethod
    async def start(cls, url: str, **options: Any) -> "RedisRig":
        return cls(url, await RedisLedger.connect(url, new_run(), **options))

    def expire(self, group: int) -> None:
        self.server.zadd(self.ledger.keys.of("leases"), {padded(group): 0}, xx=True)

    def jump(self, ms: int) -> None:
        self.server.hincrby(self.ledger.keys.of("run"), "clock_time", -ms)

    async def close(self) -> None:
        await self.ledger.close()
        self.server.close()


def spec(run: str, *, E: int = 1, B: int = 2, policy: Policy = Policy.WAIT, **values: Any) -> RunSpec:
    """A small run."""
    values = {"fingerprint": "f", "prompts": None, "steps": 100, **values}
    return RunSpec(run=run, bound=Bound(E, B, policy), **values)


class Driver:
    """A rig with a run on it, and short names for what tests do all the time."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.ledger = rig.ledger
        self._requests = itertools.count()

    async def begin(self, *, engines: tuple[str, ...] = ("eng",), **values: Any) -> "Driver":
        """Create the run; epoch `e1` stands at version 0, and the engines serve it."""
        await self.ledger.create(spec(self.rig.run, **values))
        await self.ledger.claim("e1")
        assert await self.ledger.resume("e1", 0, 7)
        for engine in engines:
            await self.ledger.applied(engine, "e1", 0)
        return self

    async def lease(
        self, engine: str = "eng", request: str = "", lease_ms: int = 600_000, groups: int = 0
    ) -> Lease:
        request = request or f"r{next(self._requests)}"
        return await self.ledger.lease(
            request=request, engine=engine, holder="worker", lease_ms=lease_ms, groups=groups
        )

    async def reaped(self, lease: Lease) -> None:
        """Let a lease run out, and give a call the chance to see it (which is refused)."""
        self.rig.expire(lease.group)
        with pytest.raises(Refused):
            await self.lease("stranger")

    async def scored(self, n: int = 1, engine: str = "eng") -> list[Lease]:
        """Lease and accept `n` groups."""
        leases = [await self.lease(engine) for _ in range(n)]
        for lease in leases:
            await self.ledger.accept(lease.group, lease.token, {lease.version: 10})
        return leases

    async def commit(
        self,
        taken: TakenBatch,
        epoch: str = "e1",
        digest: int | None = None,
        counts: dict[int, dict[int, int]] | None = None,
    ) -> int:
        counts = {group.group: dict(group.counts) for group in taken.groups} if counts is None else counts
        digest = 100 + taken.step if digest is None else digest
        return await self.ledger.commit(
            epoch,
            taken.step,
            counts,
            digest=digest,
            report=b"report%d" % taken.step,
            manifest=b"m%d" % taken.step,
        )

    async def step(self, n: int = 2, epoch: str = "e1") -> int:
        """Lease, accept, take and commit one step, and let the engine apply it."""
        await self.scored(n)
        version = await self.commit(await self.ledger.take(epoch), epoch)
        await self.ledger.applied("eng", epoch, version)
        return version

    async def refused(self, reason: Reason, call: Awaitable[Any]) -> Refused:
        """The call is refused for `reason`, and nothing has changed."""
        before = await self.ledger.status()
        with pytest.raises(Refused) as caught:
            await call
        assert caught.value.reason == reason
        assert await self.ledger.status() == before
        return caught.value
