"""Tests that a worker learns how full its engine is, and knows whether it may have its connections."""

import asyncio
import resource
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.engines.base import EngineConfig, Occupancy
from rollout.engines.scripted import ScriptedEngine
from services.rollout.service import RESERVED_FILES, allow_open_files, read_occupancy


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


def test_too_few_open_files_are_refused_with_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 1024))
    needed = RESERVED_FILES + 2 * 1024
    with pytest.raises(SettingsError, match=rf"may have 1024.*`ulimit -n {needed}`.*lower"):
        allow_open_files(1024, 2, 1)


def test_a_limit_that_may_be_raised_is_raised() -> None:
    limits, needed = resource.getrlimit(resource.RLIMIT_NOFILE), RESERVED_FILES + 2 * 3
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed - 1, limits[1]))
    try:
        allow_open_files(2, 1, 3)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == needed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_samples_without_connections_need_no_files() -> None:
    allow_open_files(10**6, 10**5, 0)
    allow_open_files(1, 8, 3)
