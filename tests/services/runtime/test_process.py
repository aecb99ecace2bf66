"""A process of a service: what it leaves behind and says when it ends."""

import dataclasses
import os
import signal
from pathlib import Path

import pytest

from protocol.errors import EngineError
from protocol.topics import Role
from services.ledger.embedded_server import EmbeddedServer
from services.runtime.process import open_process
from tests.integration.loop import settings_for


async def test_a_ledger_that_hangs_does_not_hide_why_a_service_ended(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "ledger")
    url = await server.start()
    settings = settings_for(tmp_path, "stragglers.toml")
    settings = dataclasses.replace(settings, ledger=dataclasses.replace(settings.ledger, url=url))

    async def serve() -> None:
        async with open_process(Role.MONITOR, settings, "monitor"):
            os.kill(server.pid, signal.SIGSTOP)
            raise EngineError("the engine died")

    try:
        with pytest.raises(EngineError, match="the engine died"):
            await serve()
    finally:
        os.kill(server.pid, signal.SIGCONT)
        await server.stop()
