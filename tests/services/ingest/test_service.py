"""The ingest's end: an error is reported even if archiving fails, too."""

import asyncio
import fcntl
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.topics import SCORED, Role
from services import ingest
from services.ingest.service import JUMP_S, ClockWatch
from services.ledger.embedded_server import EmbeddedServer
from services.prepare import prepare
from services.runtime.process import Process, open_process
from services.runtime.run_ledger import open_ledger
from tests.integration.loop import settings_for


@asynccontextmanager
async def opened(directory: Path, **ledger: float) -> AsyncIterator[tuple[EmbeddedServer, Process]]:
    """Create a run on a server of its own, with settings of `[ledger]`, and open the ingest's process."""
    settings = settings_for(directory, "stragglers.toml")
    spec = await asyncio.to_thread(prepare, settings)
    server = EmbeddedServer(directory / "ledger")
    url = await server.start()
    settings = replace(settings, ledger=replace(settings.ledger, url=url, **ledger))
    try:
        async with open_ledger(settings) as created:
            await created.create(spec)
        async with asyncio.timeout(60), open_process(Role.INGEST, settings, "ingest") as process:
            yield server, process
    finally:
        await server.stop()


async def test_the_error_that_ends_it_is_not_hidden_by_an_archive_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.ledger.event_log.archiver.LOCK_TIMEOUT_S", 0.05)
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        async with opened(tmp_path) as (_, process), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(ingest.serve(process), name="ingest")
            while "endpoints" not in process.info:  # noqa: ASYNC110 (info is a plain dict)
                await asyncio.sleep(0.01)
            fcntl.flock(held, fcntl.LOCK_EX)  # nobody else can write to the archive
            serving.cancel()
        assert serving.cancelled()
    finally:
        os.close(held)


async def test_it_checks_a_server_that_is_restarted_while_it_registers(tmp_path: Path) -> None:
    killed = asyncio.Event()

    def kill_once() -> None:
        if "endpoints" in process.info and not killed.is_set():
            os.kill(server.pid, signal.SIGKILL)
            while server.running():
                os.sched_yield()
            killed.set()

    async with opened(tmp_path, retry_s=10) as (server, process), asyncio.TaskGroup() as tasks:
        process.on_heartbeat.append(kill_once)  # between the first check and the registration
        tasks.create_task(ingest.serve(process), name="ingest")
        await killed.wait()
        await server.start()
        async with open_ledger(process.settings) as ledger:
            while not await ledger.endpoints(SCORED.name):  # noqa: ASYNC110 (the ledger has no event)
                await asyncio.sleep(0.05)
        process.stop.set()


class Clocks:
    """The server's wall clock, and the monotonic one of the process."""

    def __init__(self) -> None:
        self.wall_s, self.now_s, self.answer_s = 1.8e9, 5.0, 0.0

    async def wall_ms(self) -> int:
        self.pass_s(self.answer_s)
        return int(self.wall_s * 1000)

    def pass_s(self, seconds: float) -> None:
        self.wall_s += seconds
        self.now_s += seconds


@pytest.mark.parametrize(("jump_s", "said"), [(86_400, "ahead"), (-86_400, "back"), (-61, "back")])
async def test_a_jump_is_warned_of_once(jump_s: float, said: str, caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    watch = ClockWatch(clocks.wall_ms, lambda: clocks.now_s)
    with caplog.at_level(logging.WARNING):
        assert await watch.compare() == 0
        clocks.pass_s(5)
        clocks.wall_s += jump_s
        assert await watch.compare() == pytest.approx(jump_s)
        clocks.pass_s(5)
        assert await watch.compare() == pytest.approx(0)
    (warning,) = caplog.messages
    assert f"ledger.clock_jumped seconds={jump_s:+.0f}" in warning
    assert said in warning


async def test_time_that_passes_and_slow_answers_are_no_jump(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    watch = ClockWatch(clocks.wall_ms, lambda: clocks.now_s)
    with caplog.at_level(logging.WARNING):
        for answer_s in (0.0, 0.0, 3 * JUMP_S, 0.0):
            clocks.answer_s = answer_s
            clocks.pass_s(3600)
            await watch.compare()
    assert caplog.messages == []
