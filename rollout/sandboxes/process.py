"""Runs each command in the sandbox of the verifiers (`reward/sandbox`), without a network.

The working directory is an archive in memory between commands, which only the sandbox unpacks. Processes end
with the command, and a snapshot is the archive.
"""

import base64
import io
import json
import os
import tarfile
from dataclasses import replace
from pathlib import Path, PurePosixPath

import msgspec

from protocol.errors import SettingsError
from reward.sandbox.runner import Limits
from rollout.config import SandboxConfig
from rollout.sandboxes.base import Ended, Executed, SandboxCommand, SandboxDied, SandboxFull, Start
from rollout.sandboxes.runs import SandboxRuns

PROGRAM = Path(__file__).with_name("inside.py").read_text()
PACK_S = 10.0
"""Seconds to unpack and pack the directory, in addition to the command's own time."""


class CommandResult(msgspec.Struct, frozen=True):
    """Result from the sandbox; the command may have forged it."""

    said: str
    ended: Ended
    status: int
    files: str | None
    """The directory; None if it is too large."""


class ProcessSandbox:
    """The directory of one episode."""

    def __init__(self, limits: Limits, runs: SandboxRuns, files: str = "") -> None:
        self._own, self._runs, self.files = limits, runs, files
        self.most = limits.file_mb << 18
        """Bytes of the directory: a quarter of the memory file system, as the archive is there, too."""

    async def exec(self, order: SandboxCommand) -> Executed:
        executed, files = await self.executed(order)
        if files is None:
            return replace(executed, ended=executed.ended or "files")
        self.files = files
        return executed

    async def executed(self, order: SandboxCommand) -> tuple[Executed, str | None]:
        """Return how a command ended, and the directory after it; None if that is too large.

        Raises:
            SandboxDied: it exceeded a limit that ends all, or broke what it ran in.
        """
        limits = replace(
            self._own,
            wall_s=order.wall_s + PACK_S,
            output_kb=6 * (order.output >> 10) + (self.most >> 9) + 64,  # as JSON text and in base64
            processes=self._own.processes + 1,
        )
        request = {
            "command": [part.replace("\0", "") for part in order.command],
            "files": self.files,
            "wall_s": order.wall_s,
            "output": order.output,
            "directory": self.most,
            "variables": dict(order.variables),
        }
        verdict = await self._runs.run(PROGRAM, json.dumps(request), limits)
        try:
            result = msgspec.json.decode(json.loads(verdict.outputs[0]), type=CommandResult)
        except (KeyError, TypeError, ValueError, RecursionError):
            raise SandboxDied("the command was ended, as it exceeded a limit") from None
        return Executed(result.said.encode(), result.ended, result.status), result.files

    async def write(self, path: str, data: bytes) -> None:
        """Write a file into the archive, instead of one of the same name."""
        entries = {name: entry for name, entry in self._entries().items() if name != _inside(path)}
        entry = tarfile.TarInfo(_inside(path))
        entry.size, entry.mode = len(data), 0o755
        entries[entry.name] = entry, data
        if sum(entry.size + 512 for entry, _ in entries.values()) > self.most:
            raise SandboxFull(f"{path}: the directory would have more than {self.most} bytes")
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for info, contents in entries.values():
                archive.addfile(info, io.BytesIO(contents) if info.isreg() else None)
        self.files = base64.b64encode(buffer.getvalue()).decode()

    async def read(self, path: str, most: int) -> bytes | None:
        """Return a regular file of the archive; links are not followed."""
        found = self._entries().get(_inside(path))
        if found is None:
            return None
        entry, data = found
        if not entry.isreg() or entry.size > most:
            raise SandboxFull(f"{path} is no regular file of at most {most} bytes")
        return data

    async def snapshot(self) -> str:
        return self.files

    async def stop(self) -> None:
        self.files = ""

    def _entries(self) -> dict[str, tuple[tarfile.TarInfo, bytes]]:
        """Return the entries of the archive, which a command may have forged; it is not unpacked."""
        found: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
        if not self.files:
            return found
        left = self.most
        try:
            with tarfile.open(fileobj=io.BytesIO(base64.b64decode(self.files)), mode="r:gz") as archive:
                for entry in archive:
                    left -= entry.size + 512
                    if left < 0:
                        raise SandboxFull(f"the directory has more than {self.most} bytes")
                    source = archive.extractfile(entry) if entry.isreg() else None
                    found[entry.name] = entry, source.read(entry.size) if source else b""
        except (tarfile.TarError, OSError, EOFError) as error:
            raise SandboxDied(f"the directory is no archive any more: {error}") from None
        return found


class ProcessProvider:
    """Provider `process`."""

    def __init__(self, config: SandboxConfig, runs: SandboxRuns) -> None:
        self._runs = runs
        self._limits = Limits(
            cpu_s=config.cpu_s, memory_mb=config.memory_mb, file_mb=config.disk_mb, processes=config.processes
        )

    async def start(self, start: Start) -> ProcessSandbox:
        if start.endpoint:
            raise SettingsError(
                "setting environment.sandbox.name: 'process' has no network, so a harness in it cannot reach "
                "the model; use bubblewrap"
            )
        return ProcessSandbox(self._limits, self._runs, start.snapshot)

    async def clear_left(self) -> int:
        return 0  # its processes and directories end with each command

    async def forget(self, snapshot: str) -> None:
        pass

    async def close(self) -> None:
        pass


def _inside(path: str) -> str:
    """Return a path below the working directory.

    Raises:
        SandboxFull: it leads elsewhere.
    """
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise SandboxFull(f"{path!r} is not in the working directory")
    return str(parts)


def make(config: SandboxConfig) -> ProcessProvider:
    """Return the provider, which runs as many commands at once as there are processors."""
    return ProcessProvider(config, SandboxRuns(os.cpu_count() or 1))
