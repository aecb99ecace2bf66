"""Tests writes to a disk that is full: they wait, which is shown at once, and continue."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError, TetherError
from protocol.staleness import Bound, Policy
from protocol.topics import Role
from services.ledger.event_log.hash_chain import append
from services.ledger.interface import RunSpec
from services.runtime import writing
from services.runtime.process import Process
from services.runtime.writing import StoppedWaiting, retry_until_written
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.integration.loop import settings_for


@pytest.fixture
async def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(writing, "RETRY_S", 0.01)
    ledger: Any = MemoryLedger()
    await ledger.create(RunSpec("r", "f", None, steps=9, bound=Bound(1, 1, Policy.WAIT)))
    return Process(Role.TRAINER, settings_for(tmp_path / "run", "stragglers.toml"), ledger, "trainer")


async def test_a_write_waits_for_room_and_the_registry_says_so(process: Process, tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.symlink_to("/dev/full")
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        write = tasks.create_task(retry_until_written(process, partial(append, log, [b'{"step":0}'])))
        while not (peers := await process.ledger.peers()):  # noqa: ASYNC110 (the ledger tells nobody)
            await asyncio.sleep(0.01)
        assert list(peers[0].info["waits"]) == [f"room: the disk of {tmp_path / 'run'} is full"]
        assert not write.done()
        log.unlink()
    assert log.read_bytes().startswith(b'{"step":0,"chain":')
    assert process.waits == []


async def test_a_stop_ends_the_wait_and_names_the_file(process: Process, tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.symlink_to("/dev/full")
    process.stop.set()
    async with asyncio.timeout(60):
        with pytest.raises(StoppedWaiting, match=f"No space left on device: '{log}'"):
            await retry_until_written(process, partial(append, log, [b'{"step":0}']))
    assert process.waits == []


async def test_a_write_that_may_not_be_repeated_ends_its_wait(process: Process, tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.symlink_to("/dev/full")

    async def refuse() -> None:
        log.unlink()  # there is room now
        raise TetherError("another trainer holds the run")

    with pytest.raises(TetherError, match="another trainer"):
        await retry_until_written(process, partial(append, log, [b'{"step":0}']), refuse)
    assert not log.exists()
    assert process.waits == []


async def test_an_error_that_room_would_not_heal_is_raised_at_once(process: Process) -> None:
    def refuse() -> None:
        raise SettingsError("the spool was deleted")

    with pytest.raises(SettingsError, match="was deleted"):
        await retry_until_written(process, refuse)
    assert process.waits == []
