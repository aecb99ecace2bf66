"""Has the tools `shell` and `python` of an episode work in its sandbox, where they share their files."""

from collections.abc import Callable, Mapping

from rollout.sandboxes.base import SandboxCommand
from rollout.sandboxes.world import World
from rollout.tools.base import Tool
from rollout.tools.python import PROGRAM
from rollout.tools.said import said, shell_order


class ToolInWorld(Tool):
    """A tool of one episode whose calls are commands."""

    def __init__(self, world: World, order: Callable[[str], SandboxCommand]) -> None:
        self._world, self._order, self._snapshot = world, order, ""

    @property
    def kept(self) -> str:
        """The snapshot after the last call; most have none."""
        return self._snapshot

    def restore(self, text: str, state: str) -> None:
        """Note that a call was answered, by this process or an earlier one."""
        self._world.passed(self._order(text), state)

    async def run(self, text: str) -> str:
        """Return the output of the command, and its status.

        Raises:
            SandboxDied: the sandbox has ended, so that the episode fails.
        """
        order = self._order(text)
        executed, self._snapshot = await self._world.run(order)
        return said(executed, order)


def python_order(text: str, wall_s: float, output: int) -> SandboxCommand:
    """Return the order of Python code, in an interpreter of its own."""
    return SandboxCommand(("python3", "-c", PROGRAM.format(code=text.replace("\0", ""))), wall_s, output)


IN_WORLD: Mapping[str, Callable[[str, float, int], SandboxCommand]] = {
    "python": python_order,
    "shell": shell_order,
}
"""Tool -> the command of a call, with its seconds and bytes of output."""


def in_world(tool: str, world: World, wall_s: float, output: int) -> ToolInWorld:
    """Return a tool of `IN_WORLD` for one episode."""
    return ToolInWorld(world, lambda text: IN_WORLD[tool](text, wall_s, output))
