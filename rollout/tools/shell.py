"""Runs command lines of the model in the sandbox, in a directory that is kept over an episode's calls.

The directory is empty at first. Between calls it is an archive in memory, which only the sandbox unpacks.
Processes end with the call; variables and `cd` do not last either.
"""

from contextlib import AsyncExitStack

from reward.sandbox.runner import Limits
from rollout.sandboxes.base import SandboxDied
from rollout.sandboxes.process import ProcessSandbox
from rollout.sandboxes.runs import SandboxRuns
from rollout.tools.base import Tool
from rollout.tools.said import said, shell_order

ENDED = "error: the command was ended, as it exceeded a limit; the files are as before it"


class ShellTool(Tool):
    """Tool `shell`: the directory of one episode."""

    def __init__(self, limits: Limits, runs: SandboxRuns) -> None:
        self._limits, self._runs = limits, runs
        self._sandbox = ProcessSandbox(limits, runs)

    def opened(self, stack: AsyncExitStack) -> "ShellTool":
        """Return the tool with an empty directory."""
        return ShellTool(self._limits, self._runs)

    @property
    def kept(self) -> str:
        """The directory, packed."""
        return self._sandbox.files

    def restore(self, text: str, state: str) -> None:
        """Take a packed directory for the episode's."""
        self._sandbox.files = state

    async def run(self, text: str) -> str:
        """Return the command's output and its status. Cancelling kills it; the files are as before.

        Raises:
            RewardError: the sandbox cannot be set up.
        """
        order = shell_order(text, self._limits.wall_s, self._limits.output_kb << 10)
        try:
            executed, files = await self._sandbox.executed(order)
        except SandboxDied:
            return ENDED
        if files is None:
            return said(executed, order, (
                f"[the directory has more than {self._sandbox.most} bytes; it is as before the command]",
            ))  # fmt: skip
        self._sandbox.files = files
        return said(executed, order)
