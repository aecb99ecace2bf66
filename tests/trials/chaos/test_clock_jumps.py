"""A run of sessions while the clocks of the ledger and of the ingest jump by days, and workers die."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from services.ledger.redis.ledger import RedisLedger
from tests.services.ledger.conftest import missing
from tests.trials.chaos.checks import check_run
from tests.trials.chaos.faults import find
from tests.trials.chaos.place import Place, make_place
from tests.trials.chaos.run import SCRIPTED, SESSIONS, reached, tell_last_step
from tests.trials.chaos.scene import POLL_S, started

DAY_S = 86_400
JUMPS_S = ((DAY_S, 2 * DAY_S), (0, 0), (-DAY_S, -DAY_S), (2 * DAY_S, 0))
"""Clocks of ledger and ingest, one after the other."""
STEPS_S = 90.0
"""How long a few steps may take; by the ledger's clock a lease would last for a day."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_makes_its_steps_while_clocks_jump_by_days(tmp_path: Path) -> None:
    place = make_place(tmp_path / "place")
    if place.clock_library is None:
        missing("libfaketime")
    asyncio.run(jumping(place))


async def jumping(place: Place) -> None:
    async with started(place, 1, (*SCRIPTED, *SESSIONS)) as (scene, ledger, up):
        await reached(ledger, 1, up)
        for warnings, (ledger_s, ingest_s) in enumerate(JUMPS_S, 1):
            place.set_clock("redis", ledger_s)
            async with asyncio.timeout(STEPS_S):
                while warned(place) < warnings:  # noqa: ASYNC110 (a log tells nobody)
                    await asyncio.sleep(POLL_S)
            place.set_clock("ingest", ingest_s)
            for name in ("rollout.0", "rollout.1", "ingest"):  # an ingest that starts sweeps at once
                os.kill(await find(scene, name), signal.SIGKILL)
            async with asyncio.timeout(STEPS_S):
                await reached(ledger, await version(ledger) + 3, up)
            assert not up.done()
        last = await tell_last_step(ledger, place)
        async with asyncio.timeout(STEPS_S):
            await reached(ledger, last, up)
            assert await up == 0
        status = await ledger.status()
    assert check_run(place.run_dir, status).violations == []


def warned(place: Place) -> int:
    """How often the ingest has warned of the ledger's clock."""
    return (place.run_dir / "logs/ingest.log").read_text().count("ledger.clock_jumped")


async def version(ledger: RedisLedger) -> int:
    return (await ledger.status()).version
