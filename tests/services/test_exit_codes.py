"""What a service says, and to whoever keeps it running, when it cannot begin."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from services.ledger.server import EmbeddedServer
from tests.integration.command import environment
from tests.integration.loop import ROOT


def test_a_service_that_finds_no_ledger_asks_to_be_started_again(tmp_path: Path) -> None:
    """A ledger that is away for a while must not look like wrong settings: `tether up` would give the run up."""
    variables = {"TETHER_REDIS_URL": "redis://127.0.0.1:1/0", "TETHER_RUN_DIR": str(tmp_path), "TETHER_LEDGER__TIMEOUT_S": "0.2"}
    result = subprocess.run(
        [sys.executable, "-m", "services.monitor"], cwd=ROOT, env=environment(**variables), capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "did not answer" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.slow
async def test_wrong_settings_of_a_rank_are_told_once_and_as_such(tmp_path: Path) -> None:
    """torchrun ends with 1 whatever its ranks ended with: `tether up` would start the trainer again and again."""
    server = EmbeddedServer(tmp_path / "ledger")
    url = await server.start()
    try:
        variables = {
            "TETHER_REDIS_URL": url,
            "TETHER_RUN_DIR": str(tmp_path / "nowhere"),
            "TETHER_PARALLEL__TENSOR_MODEL_PARALLEL_SIZE": "2",
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.trainer",
            cwd=ROOT,
            env=environment(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    finally:
        await server.stop()
    assert process.returncode == 2, output.decode()
    assert output.decode().count("tether trainer: no run directory") == 1
