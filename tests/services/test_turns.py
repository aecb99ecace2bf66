"""Who has the device: nobody takes it from the other, and no wait is without an end."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from protocol.errors import TetherError
from protocol.topics import Role
from services.ledger.interface import Peer
from services.ledger.server import EmbeddedServer
from services.process import Process, opened
from services.settings import Settings
from services.turns import HOLDS, EngineTurn, TrainerTurn
from tests.integration.loop import settings_for


@pytest_asyncio.fixture
async def settings(tmp_path: Path) -> AsyncIterator[Settings]:
    server = EmbeddedServer(tmp_path / "ledger")
    await server.start()
    try:
        made = settings_for(tmp_path, "stragglers.toml")
        yield dataclasses.replace(made, ledger=dataclasses.replace(made.ledger, url=server.url))
    finally:
        await server.stop()


async def holders(process: Process) -> list[str]:
    return [peer.incarnation for peer in await process.ledger.peers(Role.ROLLOUT) if peer.info.get(HOLDS)]


async def test_an_engine_waits_until_a_trainer_has_ended_its_turn_and_then_holds_the_device(settings: Settings) -> None:
    async with opened(Role.ROLLOUT, settings, "rollout.0") as worker, asyncio.TaskGroup() as tasks:
        turn = EngineTurn(worker)
        taking = tasks.create_task(turn.take(), name="take")
        async with opened(Role.TRAINER, settings, "trainer") as trainer:  # registered, and silent about turns: it has just started
            mine = TrainerTurn(trainer, 5)
            turn.look()
            await mine.begin()
            assert mine.mine
            assert await holders(trainer) == []
            assert not taking.done()
            await mine.end()
            turn.look()
            async with asyncio.timeout(10):
                assert await taking
            assert await holders(trainer) == [worker.incarnation]


async def test_a_trainer_waits_for_engines_and_gives_up_by_name(settings: Settings) -> None:
    async with opened(Role.ROLLOUT, settings, "rollout.0") as worker, opened(Role.TRAINER, settings, "trainer") as trainer:
        mine = TrainerTurn(trainer, 0.2)
        await mine.begin()
        await mine.end()
        assert await EngineTurn(worker).take()
        with pytest.raises(TetherError, match=rf"{worker.incarnation} still held the device after 0\.2 s \(colocated\.wait_s\)"):
            await mine.begin()
        assert not mine.mine


async def test_a_trainer_does_not_wait_for_an_engine_that_has_died(settings: Settings) -> None:
    async with opened(Role.TRAINER, settings, "trainer") as trainer:
        await trainer.ledger.register(Peer(Role.ROLLOUT, "dead", {HOLDS: True}), ttl_ms=300)
        assert await holders(trainer) == ["dead"]
        await TrainerTurn(trainer, 30).begin()
        assert await holders(trainer) == []


async def test_a_worker_that_is_to_stop_does_not_wait_for_its_turn(settings: Settings) -> None:
    async with opened(Role.ROLLOUT, settings, "rollout.0") as worker:
        worker.stop.set()
        assert not await EngineTurn(worker).take()


async def test_one_of_two_that_take_the_device_at_once_steps_back(settings: Settings) -> None:
    async with opened(Role.ROLLOUT, settings, "rollout.0") as worker, opened(Role.TRAINER, settings, "trainer") as trainer:
        mine, turn = TrainerTurn(trainer, 10), EngineTurn(worker)
        for _ in range(20):
            await mine.begin()
            await mine.end()
            async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
                taking = tasks.create_task(turn.take(), name="take")
                beginning = tasks.create_task(mine.begin(), name="begin")
                await asyncio.wait([taking, beginning], return_when=asyncio.FIRST_COMPLETED)
                assert taking.done() != beginning.done()
                if taking.done():
                    await turn._hold(False)
                    await beginning
                await mine.end()
                turn.look()
                await taking
            await turn._hold(False)
