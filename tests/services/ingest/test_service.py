"""The ingest's end: an error is reported even if archiving fails, too."""

import asyncio
import dataclasses
import fcntl
import os
from pathlib import Path

import pytest

from protocol.topics import Role
from services import ingest
from services.ledger.embedded_server import EmbeddedServer
from services.prepare import prepare
from services.runtime.process import open_process
from services.runtime.run_ledger import open_ledger
from tests.integration.loop import settings_for


async def test_the_error_that_ends_it_is_not_hidden_by_an_archive_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.ledger.event_log.archiver.HELD_S", 0.05)
    settings = settings_for(tmp_path, "stragglers.toml")
    spec = await asyncio.to_thread(prepare, settings)
    server = EmbeddedServer(tmp_path / "ledger")
    url = await server.start()
    settings = dataclasses.replace(settings, ledger=dataclasses.replace(settings.ledger, url=url))
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        async with open_ledger(settings) as ledger:
            await ledger.create(spec)
        async with (
            asyncio.timeout(60),
            open_process(Role.INGEST, settings, "ingest") as process,
            asyncio.TaskGroup() as tasks,
        ):
            serving = tasks.create_task(ingest.serve(process), name="ingest")
            while "endpoints" not in process.info:  # noqa: ASYNC110 (info is a plain dict)
                await asyncio.sleep(0.01)
            fcntl.flock(held, fcntl.LOCK_EX)  # nobody else can write to the archive
            serving.cancel()
        assert serving.cancelled()
    finally:
        os.close(held)
        await server.stop()
