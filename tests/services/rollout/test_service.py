"""Tests that a worker learns from its engine how full it is, and does not wait for one that does not say."""

import asyncio
from pathlib import Path

from rollout.engines.base import EngineConfig, Occupancy
from rollout.engines.scripted import ScriptedEngine
from services.rollout.service import read_occupancy


class Silent(ScriptedEngine):
    """Engine in the middle of a step that does not end."""

    async def occupancy(self) -> Occupancy:
        await asyncio.Event().wait()
        return Occupancy(1)


async def test_occupancy_is_the_engines(tmp_path: Path) -> None:
    engine = ScriptedEngine(EngineConfig(name="scripted"), tmp_path, "e")
    await engine.start()
    assert await read_occupancy(engine, 60) == Occupancy(running=0)


async def test_occupancy_of_an_engine_that_does_not_say_is_not_known(tmp_path: Path) -> None:
    closed = ScriptedEngine(EngineConfig(name="scripted"), tmp_path, "e")
    await closed.close()
    assert await read_occupancy(closed, 60) == Occupancy()
    assert await read_occupancy(Silent(EngineConfig(name="scripted"), tmp_path, "s"), 0.01) == Occupancy()
