"""Tests the exit codes of a service that cannot start, and of one that has ended."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.ledger.embedded_server import EmbeddedServer
from tests.changes import slow_unless_changed
from tests.integration.command import environment
from tests.integration.loop import ROOT
from tests.warm.popen import WarmPopen
from trainer.config import ScratchConfig
from trainer.random_model import build_scratch


@slow_unless_changed("services/runtime/", "services/launcher/", "services/observability/")
def test_a_service_that_finds_no_ledger_asks_to_be_started_again(tmp_path: Path) -> None:
    """A ledger that is away for a while must not look like wrong settings: `tether up` would give the run
    up."""
    variables = {
        "TETHER_REDIS_URL": "redis://127.0.0.1:1/0",
        "TETHER_RUN_DIR": str(tmp_path),
        "TETHER_LEDGER__TIMEOUT_S": "0.2",
    }
    result = subprocess.run(
        [sys.executable, "-m", "services.monitor"],
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 3
    assert "did not answer" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("name", "rank"), [("prepare", {}), ("tracking", {}), ("trainer", {"RANK": "1"})])
def test_a_wrong_level_of_logs_ends_with_one_line(name: str, rank: dict[str, str], tmp_path: Path) -> None:
    variables = {"TETHER_RUN_DIR": str(tmp_path), "TETHER_LOG_LEVEL": "verbose", **rank}
    with WarmPopen(
        [sys.executable, "-m", f"services.{name}"],
        cwd=ROOT, env=environment(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        said = process.communicate(timeout=300)[1]
    assert process.returncode == 2
    (line,) = said.splitlines()
    assert line.startswith(f"tether {name}: variable TETHER_LOG_LEVEL: 'verbose' is not known; use one of")


SLOW_TO_LEAVE = """
import os
from protocol.topics import Role
from services.runtime.main import service_main

class Last:
    def __del__(self, read=os.read, write=os.write):
        write(1, b"leaving")
        read(0, 1)

async def serve(process):
    await process.stopped_within(0)

last = Last()
service_main(Role.MONITOR, serve)
"""
"""It exits when its standard input says so, after Python has removed its own signal handlers."""


@slow_unless_changed("services/runtime/", "services/launcher/", "services/observability/")
async def test_a_service_that_has_ended_by_itself_is_not_killed_by_being_told_to_end(tmp_path: Path) -> None:
    """A drained trainer needs a moment to exit, and may be asked to stop in that moment."""
    server = EmbeddedServer(tmp_path / "ledger")
    variables = {"TETHER_REDIS_URL": await server.start(), "TETHER_RUN_DIR": str(tmp_path)}
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            SLOW_TO_LEAVE,
            cwd=ROOT,
            env=environment(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert await process.stdout.readexactly(7) == b"leaving"
        process.send_signal(signal.SIGTERM)
        process.stdin.write(b"!")
        assert await process.wait() == 0
    finally:
        await server.stop()


PASSES_ON = """
import asyncio
from protocol.topics import Role
from services.runtime.main import service_main

async def serve(process):
    assert process.settings.ledger.url
    await (await asyncio.create_subprocess_exec("env")).wait()

service_main(Role.MONITOR, serve)
"""
"""It has a program print the variables that it inherits."""


async def test_processes_of_a_service_do_not_inherit_the_url_of_the_ledger(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "ledger")
    url = await server.start()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PASSES_ON, cwd=ROOT, stdout=subprocess.PIPE,
            env=environment(TETHER_REDIS_URL=url, TETHER_RUN_DIR=str(tmp_path)),
        )  # fmt: skip
        said = (await process.communicate())[0].decode()
        assert process.returncode == 0
        assert f"TETHER_RUN_DIR={tmp_path}" in said.splitlines()
        assert url not in said
    finally:
        await server.stop()


@pytest.mark.slow
async def test_wrong_settings_of_a_rank_are_reported_once_with_their_exit_code(tmp_path: Path) -> None:
    """torchrun ends with 1 whatever its ranks ended with: `tether up` would start the trainer again and
    again."""
    server = EmbeddedServer(tmp_path / "ledger")
    url = await server.start()
    try:
        variables = {
            "TETHER_REDIS_URL": url,
            "TETHER_RUN_DIR": str(tmp_path / "nowhere"),
            "TETHER_MODEL__PATH": str(build_scratch(ScratchConfig(), tmp_path / "model")),
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
