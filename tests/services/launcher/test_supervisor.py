"""Unregisters dead processes: real ones, in the oracle's registry."""

import asyncio
import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from protocol.errors import SettingsError
from protocol.staleness import Bound, Policy
from services.launcher.supervisor import run_up, unregister_dead, unregister_loop
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.interface import Peer, RunSpec
from services.ledger.redis.ledger import RedisLedger
from services.run_record.end import PARENT, Parent
from services.run_record.progress import Progress
from services.runtime.process import pid_space
from services.settings.load import dump_settings
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.integration.loop import settings_for
from tests.services.bus.harness import eventually

HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def peer_of(name: str, pid: object, **info: Any) -> Peer:
    return Peer("rollout", name, {"pid": pid, "pid_space": pid_space(), **info})


async def ledger_with(*peers: Peer) -> MemoryLedger:
    """A run in which each process is registered, and holds a lease."""
    ledger = MemoryLedger()
    bound = Bound(1, len(peers), Policy.WAIT)
    await ledger.create(RunSpec(run="x", fingerprint="f", prompts=None, steps=100, bound=bound))
    await ledger.claim("e")
    assert await ledger.resume("e", 0, 0)
    for peer in peers:
        name = peer.incarnation
        await ledger.register(peer, HOUR_MS)
        await ledger.applied(name, "e", 0)
        await ledger.lease(request=name, engine=name, holder=name, lease_ms=HOUR_MS)
    return ledger


def holders(ledger: MemoryLedger) -> list[str]:
    return [group.holder for group in ledger.run_state.live()]


async def names(ledger: MemoryLedger) -> list[str]:
    return [peer.incarnation for peer in await ledger.peers()]


async def test_a_process_that_was_killed_loses_registration_and_leases_and_others_keep_them(
    process: "subprocess.Popen[bytes]",
) -> None:
    ledger = await ledger_with(peer_of("killed", process.pid), peer_of("lives", os.getpid()))
    await unregister_dead(ledger)
    assert await names(ledger) == holders(ledger) == ["killed", "lives"]
    os.kill(process.pid, signal.SIGSTOP)  # silent, and alive
    await unregister_dead(ledger)
    assert holders(ledger) == ["killed", "lives"]
    process.kill()
    process.wait()
    for _ in range(2):
        await unregister_dead(ledger)
        assert await names(ledger) == holders(ledger) == ["lives"]


async def test_a_zombie_is_dead(process: "subprocess.Popen[bytes]") -> None:
    ledger = await ledger_with(peer_of("zombie", process.pid))
    process.kill()
    await eventually(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    await unregister_dead(ledger)
    assert holders(ledger) == []


@pytest.mark.parametrize(
    "info",
    [
        {"pid_space": "another boot 1"},
        {"pid_space": ""},
        {"pid_space": None},
        {"pid": None},
        {"pid": "12"},
        {"pid": -1},
        {"pid": 1 << 40},
    ],
)
async def test_a_process_that_cannot_be_proven_dead_keeps_its_leases(
    process: "subprocess.Popen[bytes]", info: dict[str, Any]
) -> None:
    process.kill()
    process.wait()
    facts = {"pid": process.pid, **info}
    ledger = await ledger_with(peer_of("far", facts.pop("pid"), **facts))
    await unregister_dead(ledger)
    assert await names(ledger) == holders(ledger) == ["far"]


async def test_a_ledger_that_is_away_delays_it_to_the_next_exit(
    process: "subprocess.Popen[bytes]", tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process.kill()
    process.wait()
    server, exited = EmbeddedServer(tmp_path), asyncio.Event()
    await server.start()
    ledger = await RedisLedger.connect(server.url, "x", timeout_s=30, retry_s=0)
    await ledger.register(peer_of("killed", process.pid), HOUR_MS)
    await server.stop()
    async with asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(unregister_loop(ledger, exited))
        await eventually(lambda: "service.not_unregistered" in caplog.text)
        await server.start()
        assert [peer.incarnation for peer in await ledger.peers()] == ["killed"]
        exited.set()
        await eventually(lambda: "service.unregistered incarnation=killed" in caplog.text)
        loop.cancel()
    assert list(await ledger.peers()) == []
    await ledger.close()
    await server.stop()


async def test_a_rerun_is_not_continued_and_nothing_is_written_there(tmp_path: Path) -> None:
    (tmp_path / PARENT).write_bytes(msgspec.json.encode(Parent("runs/a", 5)))
    settings = settings_for(tmp_path, "demo.toml")
    dump_settings(settings, tmp_path / "settings.json")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SettingsError, match="cannot be continued: it is runs/a made again, up to version 5"):
        await run_up(settings, Progress(tmp_path, 3, io.StringIO()), lambda: settings)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
