"""The embedded server loses nothing, is used by one process, and is restarted whenever it dies."""

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import redis as redis_sync
from redis.asyncio import Redis

from protocol.errors import Unavailable
from services.ledger import embedded_server
from services.ledger.embedded_server import EmbeddedServer, keep_running_loop, read_endpoint
from tests.contracts.ledger_rig import Driver, RedisRig
from tests.services.ledger.conftest import redis_binary, valkey_binary


@pytest.fixture(params=["valkey", "redis"])
def binary(request: pytest.FixtureRequest) -> str:
    return valkey_binary() if request.param == "valkey" else redis_binary()


def killed(server: EmbeddedServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    while server.running():
        os.sched_yield()


async def test_kill_9_loses_nothing_and_clients_go_on(binary: str, tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path, binary)
    url = await server.start()
    rig = await RedisRig.start(url)
    assert rig.ledger.durability == ""
    driver = await Driver(rig).begin(B=1)
    await driver.step(1)
    lease = await driver.lease()
    before = await rig.ledger.status()
    killed(server)
    second = EmbeddedServer(tmp_path, binary)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(rig.ledger.status(), name="a call while the server is away")
        assert await second.start() == url
    assert waiting.result() == before
    await rig.ledger.accept(lease.group, lease.token, {1: 1})
    await rig.close()
    await second.stop()
    assert not second.running()


async def test_endpoint_is_noted_for_the_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.ledger.embedded_server.LOCK_S", 0.1)
    server = EmbeddedServer(tmp_path)
    await server.start()
    note = json.loads((tmp_path / "endpoint.json").read_text())
    assert note == {"url": server.url, "pid": server.pid}
    assert read_endpoint(tmp_path) == server.url
    assert (tmp_path / "endpoint.json").stat().st_mode & 0o077 == 0
    config = (tmp_path / "server.conf").read_bytes()
    with pytest.raises(Unavailable, match="another ledger server uses"):
        await EmbeddedServer(tmp_path).start()
    assert server.running()
    assert (tmp_path / "server.conf").read_bytes() == config
    await server.stop()
    assert read_endpoint(tmp_path / "nowhere") is None


async def test_a_lock_that_is_held_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    """As by the child of a killed server that writes its file anew."""
    server = EmbeddedServer(tmp_path)
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    async with asyncio.TaskGroup() as tasks:
        starting = tasks.create_task(server.start(), name="a start while the lock is held")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not starting.done()
        os.close(lock)
    assert server.running()
    await server.stop()


async def test_a_busy_port_is_left_alone(tmp_path: Path) -> None:
    first, second = EmbeddedServer(tmp_path / "a"), EmbeddedServer(tmp_path / "b")
    await first.start()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "endpoint.json").write_text(
        json.dumps({"url": first.url.replace(":", ":x", 2), "pid": 0}).replace(":x//", "://")
    )
    await second.start()
    assert second.url.rpartition(":")[2] != first.url.rpartition(":")[2]
    await first.stop()
    await second.stop()


async def test_a_server_listens_where_the_system_sends_nobody(tmp_path: Path) -> None:
    """Else its port could be given away while it is killed and started again."""
    server = EmbeddedServer(tmp_path)
    port = int((await server.start()).rpartition(":")[2].partition("/")[0])
    await server.stop()
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert port < lowest or lowest <= 10_000  # there it gives away all of them


def test_server_ends_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, pathlib, signal, sys\n"
        "from services.ledger.embedded_server import EmbeddedServer\n"
        "asyncio.run(EmbeddedServer(pathlib.Path(sys.argv[1])).start())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    url = read_endpoint(tmp_path)
    assert url is not None
    pid = json.loads((tmp_path / "endpoint.json").read_text())["pid"]
    while alive(pid):
        os.sched_yield()
    with pytest.raises(redis_sync.ConnectionError), redis_sync.Redis.from_url(url) as client:
        client.ping()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_a_server_that_cannot_start_for_a_while_comes_back(tmp_path: Path) -> None:
    """As on a disk that is full: the program ends at once until there is room."""
    broken, tried = tmp_path / "broken", tmp_path / "tried"
    program = tmp_path / "program"
    program.write_text(
        f'#!/bin/sh\nif [ -e {broken} ]; then echo >> {tried}; exit 1; fi\nexec {valkey_binary()} "$@"\n'
    )
    program.chmod(0o755)
    server = EmbeddedServer(tmp_path / "ledger", str(program))
    url = await server.start()
    async with Redis.from_url(url) as client:
        await client.set("key", "value")
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(keep_running_loop(server))
        broken.touch()
        os.kill(server.pid, signal.SIGKILL)
        while not tried.is_file() or tried.stat().st_size < 7:  # noqa: ASYNC110 (a file)
            await asyncio.sleep(0.02)
        assert not keeping.done()
        broken.unlink()
        while not server.running() or server.url != url:  # noqa: ASYNC110 (a process)
            await asyncio.sleep(0.02)
        keeping.cancel()
    async with Redis.from_url(url) as client:
        assert await client.get("key") == b"value"
    await server.stop()


async def test_starts_that_fail_alike_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_server, "RETRY_S", 0.02)
    program = tmp_path / "program"
    program.symlink_to(valkey_binary())
    server = Counted(tmp_path / "ledger", str(program))
    await server.start()
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(keep_running_loop(server))
        program.unlink()
        killed(server)
        while server.starts < 5:  # noqa: ASYNC110 (a counter)
            await asyncio.sleep(0.02)
        program.symlink_to(valkey_binary())
        while "ledger.started" not in caplog.text:  # noqa: ASYNC110 (a log)
            await asyncio.sleep(0.02)
        keeping.cancel()
    events = [record.msg.split()[0] for record in caplog.records if record.name == "tether.ledger"]
    assert events == ["ledger.died", "ledger.not_started", "ledger.started"]
    await server.stop()


class Counted(EmbeddedServer):
    """Counts its starts."""

    starts = 0

    async def start(self) -> str:
        self.starts += 1
        return await super().start()
