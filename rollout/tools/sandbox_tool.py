"""Runs an episode's tools `shell` and `python` in its sandbox, where they share files."""

from collections.abc import Callable, Mapping

from rollout.sandboxes.base import SandboxCommand
from rollout.sandboxes.episode_sandbox import EpisodeSandbox
from rollout.tools.base import Tool
from rollout.tools.command_output import format_result, shell_command
from rollout.tools.python import PROGRAM


class SandboxTool(Tool):
    """Tool of one episode whose calls are commands."""

    def __init__(self, sandbox: EpisodeSandbox, make_command: Callable[[str], SandboxCommand]) -> None:
        self._sandbox, self._make_command, self._snapshot = sandbox, make_command, ""

    @property
    def kept(self) -> str:
        """Snapshot after the last call; usually empty."""
        return self._snapshot

    def restore(self, text: str, state: str) -> None:
        """Record that a call was answered, by this process or an earlier one."""
        self._sandbox.record_answer(self._make_command(text), state)

    async def run(self, text: str) -> str:
        """Return the command's output and status.

        Raises:
            SandboxDied: the sandbox has ended; the episode fails.
        """
        command = self._make_command(text)
        executed, self._snapshot = await self._sandbox.run(command)
        return format_result(executed, command)


def python_command(text: str, wall_s: float, output: int) -> SandboxCommand:
    """Return the command for Python code, which runs in a new interpreter."""
    return SandboxCommand(("python3", "-c", PROGRAM.format(code=text.replace("\0", ""))), wall_s, output)


SANDBOX_COMMANDS: Mapping[str, Callable[[str, float, int], SandboxCommand]] = {
    "python": python_command,
    "shell": shell_command,
}
"""Tool -> function (text, timeout in seconds, output limit in bytes) -> command."""


def make_sandbox_tool(tool: str, sandbox: EpisodeSandbox, wall_s: float, output: int) -> SandboxTool:
    """Return a tool of `SANDBOX_COMMANDS` for one episode."""
    return SandboxTool(sandbox, lambda text: SANDBOX_COMMANDS[tool](text, wall_s, output))
