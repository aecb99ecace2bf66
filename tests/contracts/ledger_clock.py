"""What a jump of the wall clock may cost on any ledger: no lease and no registration of who lives, and never
more than one lease time for those of the dead."""

import pytest

from protocol.errors import Refused
from services.ledger.interface import Peer
from tests.contracts.ledger_rebuild import builder_of, snapshot_of
from tests.contracts.ledger_rig import Driver, spec
from tests.contracts.memory_ledger.run_clock import LEAP_MS, TICK_MS

DAY_MS = 86_400_000
JUMPS = [DAY_MS, -DAY_MS, 2 * DAY_MS, -2 * DAY_MS]
PEER = Peer("rollout", "a.1", {})


async def called(driver: Driver) -> None:
    """A call that changes nothing but lets the ledger see that leases have run out."""
    with pytest.raises(Refused):
        await driver.lease("stranger")


async def passed(driver: Driver, ms: int) -> None:
    """So much time passes, in a run whose processes call all the time."""
    for _ in range(0, ms, LEAP_MS):
        driver.rig.jump(LEAP_MS)
        await called(driver)


async def expired(driver: Driver) -> list[int]:
    return [event["group"] for event in await driver.ledger.events(0, 1000) if event["event"] == "expire"]


class ClockContract:
    @pytest.mark.parametrize("jump_ms", JUMPS)
    async def test_a_jump_ends_nothing(self, driver: Driver, jump_ms: int) -> None:
        await driver.begin()
        await driver.ledger.register(PEER, 60_000)
        await driver.lease(lease_ms=60_000)
        driver.rig.jump(jump_ms)
        await called(driver)
        assert await expired(driver) == []
        assert list(await driver.ledger.peers()) == [PEER]

    @pytest.mark.parametrize("jump_ms", JUMPS)
    async def test_dead_holders_end_in_their_time_whatever_jumps(self, driver: Driver, jump_ms: int) -> None:
        """Registered and leased while the clock was wrong, or right: the time left is the same after it."""
        await driver.begin()
        driver.rig.jump(-jump_ms)
        await driver.ledger.register(PEER, 60_000)
        lease = await driver.lease(lease_ms=60_000)
        driver.rig.jump(jump_ms)
        await called(driver)
        await passed(driver, 40_000)
        assert (await expired(driver), list(await driver.ledger.peers())) == ([], [PEER])
        await passed(driver, 20_000)
        assert (await expired(driver), list(await driver.ledger.peers())) == ([lease.group], [])

    async def test_a_lease_ends_soon_after_an_idle_hour(self, driver: Driver) -> None:
        await driver.begin()
        lease = await driver.lease(lease_ms=10_000)
        driver.rig.jump(3_600_000)
        await called(driver)
        assert await expired(driver) == []
        await passed(driver, 10_000)
        assert await expired(driver) == [lease.group]

    async def test_short_times_between_calls_add_up(self, driver: Driver) -> None:
        await driver.begin()
        lease = await driver.lease(lease_ms=1_000)
        for _ in range(20):
            driver.rig.jump(TICK_MS // 2)
            await called(driver)
        assert await expired(driver) == [lease.group]

    async def test_a_rebuild_keeps_the_clock_of_the_registry(self, driver: Driver) -> None:
        await driver.begin()
        driver.rig.jump(DAY_MS)
        await driver.ledger.register(PEER, 60_000)
        driver.rig.jump(-DAY_MS)
        await called(driver)
        events = [dict(event) for event in await driver.ledger.events(0, 1000)]
        snapshot = snapshot_of(builder_of(events), found=events[-1]["seq"], epoch="e2")
        await driver.ledger.rebuild(spec(driver.rig.run), snapshot)
        assert list(await driver.ledger.peers()) == [PEER]
        await passed(driver, 60_000)
        assert list(await driver.ledger.peers()) == []

    async def test_ended_names_what_never_comes_back(self, driver: Driver) -> None:
        await driver.begin(B=1)
        await driver.step(1)  # group 0 is trained; no checkpoint covers it yet
        playing = await driver.lease()
        dropped = await driver.lease()
        await driver.ledger.drop(dropped.group, dropped.token, "filter")
        groups = {0, playing.group, dropped.group, 99}
        assert await driver.ledger.ended(groups) == {dropped.group}
        assert await driver.ledger.ended(set()) == set()
        await driver.ledger.checkpointed(1)
        assert await driver.ledger.ended(groups) == {0, dropped.group}
