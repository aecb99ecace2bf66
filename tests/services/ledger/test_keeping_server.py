"""The embedded server is started again whenever it dies, also when that does not succeed at once."""

import asyncio
import os
import signal
from pathlib import Path

from redis.asyncio import Redis

from services.ledger.embedded_server import EmbeddedServer, keep_running_loop
from tests.services.ledger.conftest import valkey_binary


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
