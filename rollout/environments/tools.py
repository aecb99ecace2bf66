"""Lets the model call tools in its text until it answers without a call; verifiers score the episode.

A call is a fenced block named after a tool, such as ```python; the next message is its ```output. The prompt
or `render.system` must explain the format.
"""

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import xxhash
from annotated_types import Interval

from protocol.choices import checked_name, load
from protocol.errors import SettingsError
from reward.sandbox.runner import Limits
from rollout.config import EnvironmentConfig
from rollout.environments.episode import Episode, EpisodeEnvironment
from rollout.sandboxes.episode_sandbox import EpisodeSandbox
from rollout.sandboxes.pool import SandboxPool
from rollout.sandboxes.registry import PROCESS, make_provider
from rollout.sandboxes.runs import SandboxRuns
from rollout.tools.base import Tool, as_output, find_call, is_block_name
from rollout.tools.calculator import Calculator
from rollout.tools.mcp_server import McpServer
from rollout.tools.python import PythonTool
from rollout.tools.sandbox_tool import SANDBOX_COMMANDS, make_sandbox_tool
from rollout.tools.search import SearchTool
from rollout.tools.shell import ShellTool


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tools`."""

    tools: tuple[str, ...] = ("python",)
    """Enabled tools: calculator, python, search, shell."""
    max_calls: Annotated[int, Interval(ge=0, le=10**4)] = 4
    """Maximum tool calls per episode; the turn after the last call is the answer."""
    turn_tokens: Annotated[int, Interval(ge=0, le=10**7)] = 0
    """Maximum sampled tokens per turn. 0: `sampling.max_tokens`."""
    output_characters: Annotated[int, Interval(ge=1, le=10**6)] = 2000
    """Maximum length of a tool's output, characters; the middle of longer output is cut."""
    parallel: Annotated[int, Interval(ge=0, le=10**4)] = 0
    """python, shell: concurrent calls in `process` sandboxes per rollout worker. 0: the number of processors.
    """
    limits: Limits = field(default_factory=Limits)
    """python, shell: limits of each call, as for the verifier `python_tests`. Sandboxes other than `process`
    have their own limits, and use only `output_kb`."""
    index: str = ""
    """search: index file written by `python -m rollout.tools.search build`."""
    results: Annotated[int, Interval(ge=1, le=100)] = 3
    """search: passages per result."""
    mcp: dict[str, McpServer] = field(default_factory=dict)
    """Name -> MCP server, whose tools are called in blocks of this name."""


MAKE: Mapping[str, Callable[[Options], Tool]] = {
    "calculator": lambda options: Calculator(),
    "python": lambda options: PythonTool(options.limits, _make_runs(options)),
    "search": lambda options: SearchTool(
        Path(options.index), options.results, options.output_characters // options.results
    ),
    "shell": lambda options: ShellTool(options.limits, _make_runs(options)),
}
"""Tool name -> factory."""


class Tools(EpisodeEnvironment):
    """Environment whose episodes alternate between model turns and tool results."""

    def __init__(self, options: Options) -> None:
        """Create the tools.

        Raises:
            SettingsError: a tool is unknown, the index is not configured, or the package `mcp` is missing.
        """
        super().__init__(self.play)
        if "search" in options.tools and not options.index:
            raise SettingsError("setting environment.options.index: the tool search needs an index")
        self._options = options
        names = [checked_name(name, MAKE, "setting environment.options.tools:") for name in options.tools]
        self._tools = {name: MAKE[name](options) for name in names} | _mcp_tools(options.mcp)
        self._config = EnvironmentConfig()
        self._pool: SandboxPool | None = None

    async def play(self, episode: Episode) -> None:
        """Play one episode: model turns, each but the last followed by a tool result."""
        await self.answer(episode)

    async def answer(self, episode: Episode) -> str:
        """Play one episode, and return the model's last turn."""
        async with AsyncExitStack() as exit_stack:
            tools = {name: tool.opened(exit_stack) for name, tool in self._tools.items()}
            tools |= await self._sandbox_tools(episode, exit_stack)
            return await self._answered(episode, tools)

    def apply_config(self, config: EnvironmentConfig) -> None:
        """Set up the sandboxes of tools.

        Raises:
            SettingsError: the sandbox is unknown.
        """
        self._config = config
        if config.sandbox.name != PROCESS:
            self._pool = SandboxPool(make_provider(config.sandbox), config.sandbox.starts)

    async def close(self) -> None:
        """Close connections to a sandbox service."""
        if self._pool is not None:
            await self._pool.close()

    async def _sandbox_tools(self, episode: Episode, exit_stack: AsyncExitStack) -> dict[str, Tool]:
        """Return the tools that run in the episode's sandbox; empty without a sandbox."""
        if self._pool is None:
            return {}
        config, output = self._config.sandbox, self._options.limits.output_kb << 10
        sandbox = EpisodeSandbox(self._pool, config, self._config.episode_s, episode.once)
        await exit_stack.enter_async_context(sandbox)
        return {
            name: make_sandbox_tool(name, sandbox, config.command_s, output)
            for name in self._tools
            if name in SANDBOX_COMMANDS
        }

    async def _answered(self, episode: Episode, tools: Mapping[str, Tool]) -> str:
        digest = xxhash.xxh3_128()
        for _ in range(self._options.max_calls):
            turn = await episode.generate(self._options.turn_tokens or None)
            call = find_call(turn, tools)
            if call is None:
                return turn
            tool = tools[call.tool]
            digest.update(turn.encode(errors="surrogatepass"))
            # name the result by the whole conversation, which determines it
            name = f"{call.tool} {digest.hexdigest()}"
            result, kept = await episode.once(name, functools.partial(_run, tool, call.text))
            tool.restore(call.text, kept)
            episode.insert(as_output(result, self._options.output_characters))
        return await episode.generate(self._options.turn_tokens or None)


def _mcp_tools(servers: Mapping[str, McpServer]) -> dict[str, Tool]:
    """Return the tools of MCP servers, by server name."""
    if not servers:
        return {}
    for name, server in servers.items():
        if name in MAKE or not is_block_name(name):
            raise SettingsError(
                "setting environment.options.mcp: a server is named by lower-case letters, digits and _, and "
                f"not as another tool is: {name!r}"
            )
        server.check(name)
    try:
        make: Callable[[str, McpServer], Tool] = load("rollout.tools.mcp:McpTool")
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"setting environment.options.mcp: it needs the package {error.name!r}: "
            "pip install 'tether-rl[mcp]'"
        ) from None
    return {name: make(name, server) for name, server in servers.items()}


async def _run(tool: Tool, text: str) -> tuple[str, str]:
    """Return a tool's output, and the state that it keeps."""
    answer = await tool.run(text)
    return answer, tool.kept


def _make_runs(options: Options) -> SandboxRuns:
    return SandboxRuns(options.parallel or os.cpu_count() or 1)


make = Tools
