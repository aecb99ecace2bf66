"""A connection checks its server, says what is wrong with it, and is shared by the tasks of one loop."""

import asyncio
from pathlib import Path

import pytest
import redis as redis_sync

from protocol.errors import SettingsError, Unavailable
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.interface import Peer
from services.ledger.redis.keys import Keys
from services.ledger.redis.ledger import RedisLedger
from services.ledger.redis.url import redacted
from tests.contracts.ledger_rig import Driver, RedisRig, new_run


async def test_another_user_without_the_password_is_refused(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    url = await server.start()
    host = url.rpartition("@")[2]
    with pytest.raises(SettingsError, match="check user, password and ACL"):
        await RedisLedger.connect(f"redis://:wrong@{host}", "run")
    await server.stop()


async def test_no_server_says_what_to_do(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    url = await server.start()
    ledger = await RedisLedger.connect(url, "run", retry_s=0.1)
    await server.stop()
    with pytest.raises(Unavailable) as caught:
        await RedisLedger.connect(url, "run", timeout_s=0.2)
    password = url.split(":")[2].partition("@")[0]
    assert password not in str(caught.value)
    assert redacted(url) in str(caught.value)
    with pytest.raises(Unavailable, match="did not answer"):
        await ledger.status()
    await ledger.close()


async def test_servers_of_another_kind_are_faults_of_the_settings(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    web = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = web.sockets[0].getsockname()[1]
    with pytest.raises(SettingsError, match=f"redis://127.0.0.1:{port}/0: the server is not Redis"):
        await RedisLedger.connect(f"redis://127.0.0.1:{port}/0", "run")
    web.close()
    server = EmbeddedServer(tmp_path)
    url = await server.start()
    with pytest.raises(SettingsError, match="no database of that number"):
        await RedisLedger.connect(f"{url.rpartition('/')[0]}/99", "run")
    ledger = await RedisLedger.connect(url, "run")
    with redis_sync.Redis.from_url(url) as client:
        client.set(Keys("run").of("run"), "a word")
    with pytest.raises(SettingsError, match="another program's data has a key of this run"):
        await ledger.status()
    await ledger.close()
    await server.stop()


async def test_a_replica_refuses_calls_rather_than_not_answering(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    url = await server.start()
    ledger = await RedisLedger.connect(url, "run", retry_s=0.1)
    with redis_sync.Redis.from_url(url) as client:
        client.replicaof("127.0.0.1", 1)
    with pytest.raises(Unavailable, match=r"refused calls for .* read only"):
        await Driver(RedisRig(url, ledger)).begin(B=1)
    await ledger.close()
    await server.stop()


async def test_settings_of_the_server_are_checked(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    url = await server.start()
    with redis_sync.Redis.from_url(url) as client:
        client.config_set("appendfsync", "everysec")
        ledger = await RedisLedger.connect(url, "run")
        assert "appendfsync is everysec" in ledger.durability
        await ledger.close()
        client.config_set("appendonly", "no")
        ledger = await RedisLedger.connect(url, "run")
        assert "append-only file is off" in ledger.durability
        await ledger.close()
        client.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(SettingsError, match="noeviction"):
            await RedisLedger.connect(url, "run")
    await server.stop()


async def test_urls_and_runs_are_checked(valkey_url: str) -> None:
    with pytest.raises(SettingsError, match="redis://USER:PASSWORD@HOST:PORT"):
        await RedisLedger.connect("http://u:secret@host", "run")
    server = valkey_url.rpartition("/")[0]
    for path in ("name", "1/2", "-1"):  # redis-py takes database 0 or 12
        with pytest.raises(SettingsError, match="cannot be used; write redis://USER"):
            await RedisLedger.connect(f"{server}/{path}", "run")
    with pytest.raises(SettingsError, match="run name"):
        await RedisLedger.connect(valkey_url, "No Such")
    assert redacted("rediss://u:secret@host:1/0") == "rediss://***@host:1/0"
    assert redacted("redis://host:1/0") == "redis://host:1/0"


async def test_endpoints_are_those_of_a_registry_that_was_lost_and_filled_again(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.ledger.redis.ledger.REREAD_S", 0.0)
    run = new_run()
    reader, writer = [await RedisLedger.connect(valkey_url, run) for _ in range(2)]
    await writer.register(Peer("reward", "old", {"endpoints": {"rollouts": "tcp://h:1"}}), 600_000)
    assert dict(await reader.endpoints("rollouts")) == {"old": "tcp://h:1"}
    with redis_sync.Redis.from_url(valkey_url) as client:
        client.delete(*writer.keys.all)
    await writer.register(Peer("reward", "new", {"endpoints": {"rollouts": "tcp://h:2"}}), 600_000)
    assert dict(await reader.endpoints("rollouts")) == {"new": "tcp://h:2"}  # after as many changes as before
    await reader.close()
    await writer.close()


async def test_one_client_serves_many_tasks_and_outlives_cancelled_ones(valkey_url: str) -> None:
    rig = await RedisRig.start(valkey_url)
    driver = await Driver(rig).begin(E=9, B=10)
    async with asyncio.TaskGroup() as tasks:
        leasing = [tasks.create_task(driver.lease(), name=f"lease {n}") for n in range(60)]
        dying = [tasks.create_task(rig.ledger.status(), name=f"status {n}") for n in range(20)]
        await asyncio.sleep(0)
        for task in dying:
            task.cancel()
    assert sorted(task.result().group for task in leasing) == list(range(60))
    assert (await rig.ledger.status()).issued == 60
    await rig.close()


@pytest.mark.parametrize("turns", range(12))
async def test_a_cancellation_in_a_call_is_not_lost(valkey_url: str, turns: int) -> None:
    ledger = await RedisLedger.connect(valkey_url, new_run())

    async def beat() -> None:
        await ledger.register(Peer("rollout", "x", {}), 5000)
        await asyncio.Event().wait()

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(beat())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()
    await ledger.close()


async def test_a_call_waits_while_the_server_is_full(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    url = await server.start()
    run = new_run()
    ledger = await RedisLedger.connect(url, run, retry_s=20.0)
    driver = await Driver(RedisRig(url, ledger)).begin(B=1)
    with redis_sync.Redis.from_url(url) as client:
        client.config_set("maxmemory", 1)
        async with asyncio.TaskGroup() as tasks:
            leasing = tasks.create_task(driver.lease(), name="lease")
            _, waiting = await asyncio.wait({leasing}, timeout=0.5)
            client.config_set("maxmemory", 0)
        assert waiting == {leasing}
    assert leasing.result() is not None
    await ledger.close()
    await server.stop()
