import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from protocol.errors import SettingsError
from services.ledger.embedded_server import EmbeddedServer, find_server
from tests.contracts.ledger_rig import Driver, MemoryRig, RedisRig, Rig


def missing(what: str) -> None:
    """A server that is not installed is skipped on a laptop and fails in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is not installed")
    pytest.skip(f"{what} is not installed")


def valkey_binary() -> str:
    try:
        path = find_server()
    except SettingsError:
        path = ""
    if "valkey" not in Path(path).name:
        missing("valkey-server")
    return path


def redis_binary() -> str:
    path = shutil.which("redis-server")
    if path is None:
        missing("redis-server")
    return str(path)


def serve(directory: Path, binary: str) -> Iterator[str]:
    server = EmbeddedServer(directory, binary)
    asyncio.run(server.start())
    with redis.Redis.from_url(server.url) as client:
        client.config_set("appendfsync", "no")  # tests of durability start servers of their own
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from serve(tmp_path_factory.mktemp("valkey"), valkey_binary())


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from serve(tmp_path_factory.mktemp("redis"), redis_binary())


@pytest.fixture(params=["memory", "valkey", "redis"])
def url(request: pytest.FixtureRequest) -> str | None:
    """Where the ledger lies; None for the one in memory."""
    return None if request.param == "memory" else str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
async def rig(url: str | None) -> AsyncIterator[Rig]:
    made: Rig = MemoryRig(archive_limit=200) if url is None else await RedisRig.start(url, archive_limit=200)
    yield made
    await made.close()


@pytest.fixture
def driver(rig: Rig) -> Driver:
    return Driver(rig)
