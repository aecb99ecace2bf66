"""Runs each command in the sandbox of the verifiers (`reward/sandbox`), without a network.

Between commands the working directory is an in-memory archive, which is unpacked only in the sandbox.
Processes end with the command. The tool `shell` uses this unless an episode has a sandbox.
"""

import json
from dataclasses import replace
from pathlib import Path

import msgspec

from reward.sandbox.runner import Limits
from rollout.sandboxes.base import Ended, Executed, SandboxCommand, SandboxDied
from rollout.sandboxes.runs import SandboxRuns

PROGRAM = Path(__file__).with_name("inside.py").read_text()
PACK_S = 10.0
"""Seconds to unpack and pack the directory, in addition to the command's timeout."""


class CommandResult(msgspec.Struct, frozen=True):
    """Result from the sandbox; the command may have forged it."""

    said: str
    ended: Ended
    status: int
    files: str | None
    """Packed directory; None if it is too large."""


class ProcessSandbox:
    """Working directory of one episode."""

    def __init__(self, limits: Limits, runs: SandboxRuns) -> None:
        self._limits, self._runs, self.files = limits, runs, ""
        self.max_bytes = limits.file_mb << 18
        """Size limit of the directory, bytes: a quarter of the in-memory file system, which also holds the
        archive."""

    async def executed(self, order: SandboxCommand) -> tuple[Executed, str | None]:
        """Return (result of a command, packed directory); None if the directory is too large.

        Raises:
            SandboxDied: the command exceeded a limit of the whole sandbox, or broke the sandbox.
        """
        limits = replace(
            self._limits,
            wall_s=order.wall_s + PACK_S,
            output_kb=6 * (order.output >> 10) + (self.max_bytes >> 9) + 64,  # JSON-escaped and base64
            processes=self._limits.processes + 1,
        )
        request = {
            "command": [part.replace("\0", "") for part in order.command],
            "files": self.files,
            "wall_s": order.wall_s,
            "output": order.output,
            "directory": self.max_bytes,
            "variables": dict(order.variables),
        }
        verdict = await self._runs.run(PROGRAM, json.dumps(request), limits)
        try:
            result = msgspec.json.decode(json.loads(verdict.outputs[0]), type=CommandResult)
        except (KeyError, TypeError, ValueError, RecursionError):
            raise SandboxDied("the command was ended, as it exceeded a limit") from None
        return Executed(result.said.encode(), result.ended, result.status), result.files
