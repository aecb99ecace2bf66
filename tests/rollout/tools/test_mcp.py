"""Tools of MCP servers that the package `mcp` serves, by both of its transports."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.config import EnvironmentConfig
from rollout.environments.registry import make_environment
from rollout.render import RenderConfig, Renderer
from rollout.tools.mcp import USAGE, McpTool
from rollout.tools.mcp_server import McpServer
from tests.changes import slow_unless_changed
from tests.rollout.environments.test_environments import Player, play
from tests.rollout.tokenizers import write_tokenizer

THINGS = Path(__file__).with_name("mcp_things.py")
pytestmark = slow_unless_changed("rollout/tools/", "rollout/environments/tools.py")

PROGRAM = McpServer((sys.executable, str(THINGS)), variables={"WHO": "me"})


@pytest.fixture(scope="module")
def service() -> Iterator[McpServer]:
    with subprocess.Popen([sys.executable, THINGS, "http"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while (found := re.search(r"running on (http://\S+)", process.stderr.readline())) is None:
            assert process.poll() is None
        yield McpServer(url=f"{found[1]}/mcp", key_env="HOME")
        process.kill()


async def test_a_program_answers_calls_and_errors_until_it_ends() -> None:
    async with AsyncExitStack() as episode:
        tool = McpTool("things", PROGRAM).opened(episode)
        assert await tool.run('add {"a": 40, "b": 2}') == "42"
        assert await tool.run('add\n{"a": 40,\n"b": 2}\n') == "42"
        assert await tool.run("hush") == ""
        assert (await tool.run("")).splitlines()[0].startswith('add: Add two numbers. {"type": "object"')
        assert await tool.run("add 40 2") == f"error: {USAGE}"
        assert "field required" in (await tool.run("add")).lower()
        assert await tool.run("none") == "error: Unknown tool: none"
        with pytest.raises(RuntimeError, match="the MCP server 'things': Connection closed"):
            await tool.run("end")


async def test_recorded_calls_run_again_in_a_new_program_alone(service: McpServer) -> None:
    async with AsyncExitStack() as episode:
        tools = McpTool("a", PROGRAM).opened(episode), McpTool("b", service).opened(episode)
        for tool in reversed(tools):
            tool.restore("count", "")
            assert (await tool.run("count")).split() == (["2", "me"] if tool is tools[0] else ["1"])
            tool.restore("count", "")  # by this process
        assert await tools[0].run("count") == "3 me"


async def test_a_service_that_is_not_there_fails_the_episode() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    async with AsyncExitStack() as episode:
        tool = McpTool("far", McpServer(url=f"http://127.0.0.1:{port}/mcp")).opened(episode)
        with pytest.raises(RuntimeError, match="the MCP server 'far': All connection attempts failed"):
            await tool.run("")


async def test_a_service_that_ends_in_an_episode_fails_its_next_call(service: McpServer) -> None:
    async with AsyncExitStack() as episode:
        tool = McpTool("things", service).opened(episode)
        assert await tool.run('add {"a": 1, "b": 1}') == "2"
        for call in ("end", "add"):
            with pytest.raises(RuntimeError, match="the MCP server 'things': Connection closed"):
                await tool.run(call)


def test_an_episode_calls_servers_by_their_names(tmp_path: Path) -> None:
    renderer = Renderer(write_tokenizer(tmp_path, more='`{}":,'), RenderConfig())
    options = {"tools": ["calculator"], "mcp": {"things": {"command": PROGRAM.command}}}
    lines = ['```things\nadd {"a": 4, "b": 2}\n```', "```things\ncount\n```", "```calculator\n42\n```", "8"]
    tools = make_environment(EnvironmentConfig("tools", options))
    said = renderer.text(play(tools, renderer, Player(renderer, *lines)).tokens)
    assert [block.split("\n")[0].strip() for block in said.split("```output\n")[1:]] == ["6", "1", "42"]


@pytest.mark.parametrize(
    ("servers", "why"),
    [
        ({"a": {}}, "mcp.a: one of command and url, not neither"),
        ({"a": {"command": ["x"], "url": "http://x"}}, "not both"),
        ({"python": {"command": ["x"]}}, "not as another tool is: 'python'"),
        ({"A b": {"command": ["x"]}}, "lower-case"),
        ({"a": {"url": "http://x", "key_env": "NO_SUCH_KEY"}}, "no variable NO_SUCH_KEY"),
        ({"a": {"comand": ["x"]}}, "option mcp.a.comand is not known"),
    ],
)
def test_wrong_servers_are_refused(servers: dict[str, object], why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        make_environment(EnvironmentConfig("tools", {"mcp": servers}))
