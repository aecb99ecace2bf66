"""Runs the agents of docs/agents.md as they are written."""

import importlib
import re
import sys
import tomllib
from pathlib import Path

import pytest
from aiohttp import web
from typer.testing import CliRunner

from protocol.rollout_view import decode_rollout
from rollout.config import EnvironmentConfig
from services.cli import app
from tests.rollout.environments.groups import generated

PAGE = Path(__file__).resolve().parents[2] / "docs/agents.md"
BLOCK = re.compile(r'^```python title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in BLOCK.findall(PAGE.read_text()):
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


async def test_the_function_of_the_page_is_an_agent(place: Path) -> None:
    config = EnvironmentConfig("agent", {"function": "my_agent:solve"}, attempts=1)
    rows = decode_rollout(await generated(place, config)).rows
    assert [row.environment_reward for row in rows] == [0.0, 0.0]
    assert not rows[0].sampled.all()


async def test_the_function_of_the_page_that_has_a_tool_is_an_agent(place: Path) -> None:
    config = EnvironmentConfig("agent", {"function": "my_tool_agent:solve"}, attempts=1)
    rows = decode_rollout(await generated(place, config)).rows
    assert [row.environment_reward for row in rows] == [0.0, 0.0]


async def test_the_program_of_the_page_is_an_agent(place: Path) -> None:
    options = {"command": [sys.executable, "-m", "my_program"], "directory": str(place)}
    rows = decode_rollout(await generated(place, EnvironmentConfig("command", options, attempts=1), n=1)).rows
    assert [row.environment_reward for row in rows] == [0.0]


async def test_the_program_of_the_page_that_stays_is_an_agent(place: Path) -> None:
    command = ["python", "-m", "my_standing_program"]
    options = {"command": command, "directory": str(place), "processes": 1}
    rows = decode_rollout(await generated(place, EnvironmentConfig("command", options, attempts=1))).rows
    assert [row.environment_reward for row in rows] == [0.0, 0.0]


async def test_the_program_of_the_page_runs_against_an_endpoint_off_the_host(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for command in re.findall(r"^tether (keys .*)$", PAGE.read_text(), re.MULTILINE):
        assert CliRunner().invoke(app, command.split()).exit_code == 0
    text = re.search(
        r'^```toml title="off_host.toml"\n(.*?)^```$', PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert text is not None
    options = {
        "command": [sys.executable, "-m", "my_program"],
        "directory": str(place),
        "variables": {"SSL_CERT_FILE": str(place / "keys/endpoint.crt")},
    }
    section = {"name": "command", "options": options, "attempts": 1, **tomllib.loads(text[1])["environment"]}
    rows = decode_rollout(await generated(place, EnvironmentConfig(**section), n=1)).rows
    assert [row.environment_reward for row in rows] == [0.0]


async def test_the_server_of_the_page_is_an_agent(place: Path) -> None:
    runner = web.AppRunner(importlib.import_module("my_server").app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        options = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}/run"}
        rollout = await generated(place, EnvironmentConfig("server", options, attempts=1))
    finally:
        await runner.cleanup()
    assert [row.environment_reward for row in decode_rollout(rollout).rows] == [0.0, 0.0]
