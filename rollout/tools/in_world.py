"""Runs an episode's tools `shell` and `python` in its sandbox, where they share files."""

from collections.abc import Callable, Mapping

from rollout.sandboxes.base import SandboxCommand
from rollout.sandboxes.world import World
from rollout.tools.base import Tool
from rollout.tools.python import PROGRAM
from rollout.tools.said import said, shell_order


class ToolInWorld(Tool):
    """Tool of one episode whose calls are commands."""

    def __init__(self, world: World, order: Callable[[str], SandboxCommand]) -> None:
        self._world, self._order, self._snapshot = world, order, ""

    @property
    def kept(self) -> str:
        """Snapshot after the last call; usually empty."""
        return self._snapshot

    def restore(self, text: str, state: str) -> None:
        """Record that a call was answered, by this process or an earlier one."""
        self._world.passed(self._order(text), state)

    async def run(self, text: str) -> str:
        """Return the command's output and status.

        Raises:
            SandboxDied: the sandbox has ended; the episode fails.
        """
        order = self._order(text)
        executed, self._snapshot = await self._world.run(order)
        return said(executed, order)


def python_order(text: str, wall_s: float, output: int) -> SandboxCommand:
    """Return the command for Python code, which runs in a new interpreter."""
    return SandboxCommand(("python3", "-c", PROGRAM.format(code=text.replace("\0", ""))), wall_s, output)


IN_WORLD: Mapping[str, Callable[[str, float, int], SandboxCommand]] = {
    "python": python_order,
    "shell": shell_order,
}
"""Tool -> function (text, timeout in seconds, output limit in bytes) -> command."""


def in_world(tool: str, world: World, wall_s: float, output: int) -> ToolInWorld:
    """Return a tool of `IN_WORLD` for one episode."""
    return ToolInWorld(world, lambda text: IN_WORLD[tool](text, wall_s, output))
