"""Leases and registrations on a real server whose wall clock jumps by days, in both directions."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.ledger.embedded_server import EmbeddedServer
from services.ledger.interface import Lease, Peer
from tests.changes import slow_unless_changed
from tests.contracts.ledger_rig import Driver, RedisRig
from tests.services.ledger.conftest import missing, redis_binary, valkey_binary
from tests.trials.chaos.place import Place, make_place

DAY_S = 86_400
LEASE_MS = 4_000
DEADLINE_S = 60.0
"""For what must happen within seconds, and would take a day by the server's clock."""
POLL_S = 0.05
MALLOC = "libc_malloc_debug.so.0"
"""glibc's malloc: the jemalloc of Debian's Redis asks libfaketime for the time before that is ready."""


@dataclass
class World:
    """A server with a clock of its own, a run on it, and a worker that lives."""

    place: Place
    server: EmbeddedServer
    driver: Driver
    rig: RedisRig

    @classmethod
    @asynccontextmanager
    async def started(cls, root: Path, binary: str) -> "AsyncIterator[World]":
        place = make_place(root / "place")
        if place.clock_library is None:
            missing("libfaketime")
        server = EmbeddedServer(root / "ledger", str(place.with_clock("server", binary, "redis", MALLOC)))
        try:
            rig = await RedisRig.start(await server.start())
            try:
                yield cls(place, server, await Driver(rig).begin(B=8), rig)
            finally:
                await rig.close()
        finally:
            await server.stop()

    async def set_clock(self, offset_s: int, *, was_s: int) -> None:
        """Set the server's clock, and return once it shows that."""
        before_ms = await self.rig.ledger.wall_ms()
        self.place.set_clock("redis", offset_s)
        async with asyncio.timeout(DEADLINE_S):
            while abs(await self.rig.ledger.wall_ms() - before_ms) < abs(offset_s - was_s) * 500:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    async def live(self, lease: Lease) -> None:
        """Register and extend a lease all the time, until cancelled."""
        while True:
            await self.rig.ledger.register(Peer("rollout", "live", {}), LEASE_MS)
            await self.rig.ledger.extend(lease.group, lease.token, LEASE_MS)
            await asyncio.sleep(POLL_S)

    async def registered(self) -> list[str]:
        return [peer.incarnation for peer in await self.rig.ledger.peers()]

    async def expired(self) -> list[int]:
        return [e["group"] for e in await self.rig.ledger.events(0, 10_000) if e["event"] == "expire"]

    async def buried(self, dead: Lease) -> None:
        """Wait until the lease of a dead worker has expired and its registration is over."""
        async with asyncio.timeout(DEADLINE_S):
            while dead.group not in await self.expired() or "dead" in await self.registered():  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "binary",
    [
        pytest.param(valkey_binary, marks=slow_unless_changed("services/ledger/", "services/ingest/")),
        pytest.param(redis_binary, marks=slow_unless_changed("services/ledger/", "services/ingest/")),
    ],
)
async def test_jumps_end_what_is_dead_in_its_time_and_nothing_else(
    binary: Callable[[], str], tmp_path: Path
) -> None:
    async with World.started(tmp_path, binary()) as world, asyncio.TaskGroup() as tasks:
        lives = await world.driver.lease(lease_ms=LEASE_MS)
        worker = tasks.create_task(world.live(lives))
        was_s, dead = 0, []
        for offset_s in (DAY_S, 0, -DAY_S, 2 * DAY_S, -DAY_S):
            dead.append(await world.driver.lease(lease_ms=LEASE_MS))
            await world.rig.ledger.register(Peer("rollout", "dead", {}), LEASE_MS)
            await world.set_clock(offset_s, was_s=was_s)
            await world.buried(dead[-1])
            assert await world.expired() == [lease.group for lease in dead]
            assert await world.registered() == ["live"]
            again = await world.driver.lease(lease_ms=600_000)
            assert again.group == dead[-1].group  # leased before new ones, and out of the way of the next
            was_s = offset_s
        worker.cancel()


@pytest.mark.timeout(300)
async def test_the_clock_survives_a_restart_of_the_server_a_day_back(tmp_path: Path) -> None:
    async with World.started(tmp_path, valkey_binary()) as world:
        await world.set_clock(DAY_S, was_s=0)
        dead = await world.driver.lease(lease_ms=LEASE_MS)
        await world.rig.ledger.register(Peer("rollout", "dead", {}), LEASE_MS)
        await world.server.stop()
        world.place.set_clock("redis", 0)
        await world.server.start()
        async with asyncio.TaskGroup() as tasks:
            worker = tasks.create_task(world.live(await world.driver.lease(lease_ms=LEASE_MS)))
            await world.buried(dead)
            worker.cancel()
