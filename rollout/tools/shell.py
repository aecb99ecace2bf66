"""Runs the model's command lines in the sandbox, in a directory that persists over an episode's calls.

The directory is initially empty. Between calls it is an in-memory archive, which is unpacked only in the
sandbox. Processes end with the call; variables and `cd` do not persist.
"""

from contextlib import AsyncExitStack

from reward.sandbox.runner import Limits
from rollout.sandboxes.base import SandboxDied
from rollout.sandboxes.process import ProcessSandbox
from rollout.sandboxes.runs import SandboxRuns
from rollout.tools.base import Tool
from rollout.tools.command_output import format_result, shell_command

ENDED = "error: the command was ended, as it exceeded a limit; the files are as before it"


class ShellTool(Tool):
    """Tool `shell`, with the directory of one episode."""

    def __init__(self, limits: Limits, runs: SandboxRuns) -> None:
        self._limits, self._runs = limits, runs
        self._sandbox = ProcessSandbox(limits, runs)

    def opened(self, stack: AsyncExitStack) -> "ShellTool":
        """Return a tool instance with an empty directory."""
        return ShellTool(self._limits, self._runs)

    @property
    def kept(self) -> str:
        """Packed directory."""
        return self._sandbox.files

    def restore(self, text: str, state: str) -> None:
        """Restore the episode's directory from a packed one."""
        self._sandbox.files = state

    async def run(self, text: str) -> str:
        """Return the command's output and status. Cancelling kills the command; files stay unchanged.

        Raises:
            RewardError: the sandbox cannot be set up.
        """
        command = shell_command(text, self._limits.wall_s, self._limits.output_kb << 10)
        try:
            executed, files = await self._sandbox.executed(command)
        except SandboxDied:
            return ENDED
        if files is None:
            return format_result(executed, command, (
                f"[the directory has more than {self._sandbox.max_bytes} bytes; it is as before the command]",
            ))  # fmt: skip
        self._sandbox.files = files
        return format_result(executed, command)
