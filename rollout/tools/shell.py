"""Runs command lines of the model in the sandbox, in a directory that is kept over an episode's calls.

The directory is empty at first. Between calls it is an archive in memory, which only the sandbox unpacks.
Processes end with the call; variables and `cd` do not last either.
"""

import json
from dataclasses import replace
from pathlib import Path

import msgspec

from reward.sandbox.runner import Limits
from rollout.tools.base import Tool
from rollout.tools.sandbox_runs import SandboxRuns

PROGRAM = Path(__file__).with_name("shell_program.py").read_text()
PACK_S = 10.0
"""Seconds to unpack and pack the directory, in addition to the command's own time."""
ENDED = "error: the command was ended, as it exceeded a limit; the files are as before it"


class CommandResult(msgspec.Struct, frozen=True):
    """Result from the sandbox; the command may have forged it."""

    said: str
    ended: str
    """Why the command was ended: "time", "output", or empty."""
    status: int
    files: str | None
    """The directory; None if it is too large."""


class ShellTool(Tool):
    """Tool `shell`: the directory of one episode."""

    def __init__(self, limits: Limits, runs: SandboxRuns) -> None:
        self._own, self._runs, self._files = limits, runs, ""
        self._output = limits.output_kb << 10
        self._directory = limits.file_mb << 18
        """A quarter of the memory file system: the archive is there, too, when it comes and goes."""
        self._limits = replace(
            limits,
            wall_s=limits.wall_s + PACK_S,
            output_kb=6 * limits.output_kb + (self._directory >> 9) + 64,  # as JSON text and in base64
            processes=limits.processes + 1,
        )

    def opened(self) -> "ShellTool":
        """Return the tool with an empty directory."""
        return ShellTool(self._own, self._runs)

    @property
    def kept(self) -> str:
        """The directory, packed."""
        return self._files

    def restore(self, state: str) -> None:
        """Take a packed directory for the episode's."""
        self._files = state

    async def run(self, text: str) -> str:
        """Return the command's output and its status. Cancelling kills it; the files are as before.

        Raises:
            RewardError: the sandbox cannot be set up.
        """
        order = {
            "command": text.replace("\0", ""),
            "files": self._files,
            "wall_s": self._own.wall_s,
            "output": self._output,
            "directory": self._directory,
        }
        verdict = await self._runs.run(PROGRAM, json.dumps(order), self._limits)
        try:
            result = msgspec.json.decode(json.loads(verdict.outputs[0]), type=CommandResult)
        except (KeyError, TypeError, ValueError, RecursionError):
            return ENDED
        notes = [result.said.rstrip("\n")]
        if result.ended:
            limit = f"{self._own.wall_s:g} s" if result.ended == "time" else f"{self._output} bytes of output"
            notes.append(f"[ended after {limit}]")
        elif result.status:
            notes.append(f"[exit status {result.status}]")
        if result.files is None:
            notes.append(
                f"[the directory has more than {self._directory} bytes; it is as before the command]"
            )
        else:
            self._files = result.files
        return "\n".join(note for note in notes if note) or "(no output)"
