"""Which recorded calls are forgotten: those of groups that ended without a record, and no others, whatever
clocks do."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.codec import encode_payload
from services.ingest.call_sweep import CallSweep
from services.ledger.interface import Lease
from tests.contracts.ledger_rig import Driver, MemoryRig
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.protocol.samples import CALL
from trainer.storage.call_store import CallStore
from trainer.storage.spool import Spool

KEPT_S = 100.0


class World:
    """A ledger with a run, a spool, and a sweep whose clock the test sets."""

    def __init__(self, spool: Spool) -> None:
        self.store, self.now_s = CallStore(spool), 0.0
        self.driver = Driver(MemoryRig())
        self.sweep = CallSweep(self.driver.ledger, self.store, KEPT_S, lambda: self.now_s)

    async def playing(self) -> Lease:
        """A group that is leased and has made a call."""
        lease = await self.driver.lease()
        self.store.hold(lease.group, lease.token)
        call = replace(CALL, group=lease.group, token=lease.token)
        assert self.store.put_many([(call, encode_payload(call))]) == [""]
        return lease


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with closing(Spool(tmp_path / "spool.sqlite")) as spool:
        yield World(spool)


async def test_calls_of_a_live_group_are_kept_however_long_it_plays(world: World) -> None:
    await world.driver.begin()
    lease = await world.playing()
    for now_s in (0.0, 2 * 86_400.0, 10**9):
        world.now_s = now_s
        assert await world.sweep.sweep() == 0
    assert world.store.groups() == [lease.group]


async def test_calls_of_a_group_that_waits_for_another_lease_are_kept(world: World) -> None:
    await world.driver.begin()
    lease = await world.playing()
    await world.driver.ledger.release(lease.group, lease.token, "drain")
    world.now_s = 10**9
    assert await world.sweep.sweep() == 0
    assert world.store.groups() == [lease.group]


async def test_calls_of_an_ended_group_are_forgotten_in_time(world: World) -> None:
    await world.driver.begin()
    kept, ended = await world.playing(), await world.playing()
    await world.driver.ledger.drop(ended.group, ended.token, "straggler")
    world.now_s = 10**6
    assert await world.sweep.sweep() == 0  # found now, so its time begins now
    world.now_s += KEPT_S - 1
    assert await world.sweep.sweep() == 0
    world.now_s += 1
    assert await world.sweep.sweep() == 1
    assert world.store.groups() == [kept.group]
    assert not world.store.is_held(ended.group, ended.token)


async def test_a_sweep_before_the_run_is_created_does_nothing(world: World) -> None:
    assert isinstance(world.driver.ledger, MemoryLedger)
    assert await world.sweep.sweep() == 0
