"""Implements a sandbox on a cloud provider's machine, for any client.

Each request is a file on the machine. `rollout/sandboxes/inside.py` processes it as root, and writes the
reply to another file. Commands run as an unprivileged user, who cannot read either file, with the same limits
as in other sandboxes. Total memory and disk are limited by the machine.
"""

import asyncio
import io
import json
import secrets
import shlex
import tarfile
from collections.abc import Mapping
from typing import Any, Protocol

from protocol.errors import SettingsError
from rollout.config import SandboxConfig
from rollout.programs.folder import ProgramFolder
from rollout.sandboxes.base import SandboxDied, SandboxFull, Start
from rollout.sandboxes.served import FIRST_UID, GRACE_S, INSIDE, RpcSandbox

FOLDER, WORK = "/tmp/.tether", "/tmp/sandbox"
"""Directories on the machine: root's, with requests and replies, and the episode's."""


class RemoteMachine(Protocol):
    """Machine for one episode. Every call raises `SandboxDied` if it fails."""

    async def run(self, line: str, wall_s: float) -> str:
        """Run a shell line as root; return the error text, empty if the status is 0."""

    async def put(self, path: str, data: bytes) -> None:
        """Write a file as root."""

    async def get(self, path: str) -> bytes:
        """Return the contents of a file as root."""

    async def remove(self) -> None:
        """End the machine; an already ended machine is not an error."""


class RemoteSandbox(RpcSandbox):
    """Sandbox on a remote machine."""

    def __init__(self, machine: RemoteMachine, config: SandboxConfig, folder: ProgramFolder) -> None:
        """Args: folder: folder on this host, which exists while the worker lives."""
        super().__init__(config.disk_mb << 20)
        self._machine, self._config, self._folder = machine, config, folder
        settings = {
            "work": WORK,
            "uid": FIRST_UID + secrets.randbelow(1 << 24),  # the kernel counts processes per user
            "cpu_s": config.cpu_s,
            "processes": config.processes,
            "memory_mb": config.memory_mb,
            "filter": "",
        }
        program = f"python3 -I inside.py one {shlex.quote(json.dumps(settings))}"
        self._line = f"cd {FOLDER} && {program} < request > answer"
        self._dead = ""
        """Why the sandbox is unusable; empty: it is usable."""

    async def begin(self, start: Start) -> None:
        """Install the program, the read-only directories, and the files of a snapshot."""
        written = shlex.join((WORK, *self._config.directories))
        await self._ran(f"mkdir -m 700 {FOLDER} && mkdir -p {written} && chmod 1777 {written}", GRACE_S)
        await self._machine.put(f"{FOLDER}/inside.py", INSIDE.encode())
        if self._config.read_only:
            packed = await asyncio.to_thread(_packed, self._config.read_only, self._max_pack_bytes)
            await self._machine.put(f"{FOLDER}/more.tar", packed)
            await self._ran(f"tar -xf {FOLDER}/more.tar -C /", self.pack_s)
        if start.snapshot:
            await self.unpack(start.snapshot)

    async def stop(self) -> None:
        self._dead = "the sandbox was stopped"
        try:
            await self._machine.remove()
        finally:
            self._folder.close()

    async def _request(
        self, request: Mapping[str, Any], data: bytes = b"", wall_s: float = GRACE_S
    ) -> tuple[dict[str, Any], bytes]:
        if self._dead:
            raise SandboxDied(self._dead)
        self._dead = "an earlier call was given up, so that the sandbox's state is unknown"
        line = json.dumps({**request, "bytes": len(data)}).encode()
        try:
            async with asyncio.timeout(wall_s + 3 * GRACE_S):
                await self._machine.put(f"{FOLDER}/request", line + b"\n" + data)
                await self._ran(self._line, wall_s)
                answer = await self._machine.get(f"{FOLDER}/answer")
        except TimeoutError:
            raise SandboxDied(f"it did not answer within {wall_s:g} s") from None
        head, _, data = answer.partition(b"\n")
        try:
            fields: dict[str, Any] = json.loads(head)
            is_whole = fields["bytes"] == len(data)
        except (ValueError, TypeError, KeyError):
            is_whole = False
        if not is_whole:
            raise SandboxDied(f"the sandbox's machine returned an incomplete reply: {head[:100]!r}")
        self._dead = ""
        if "error" in fields:
            raise SandboxFull(fields["error"])
        return fields, data

    async def _ran(self, line: str, wall_s: float) -> None:
        if error := await self._machine.run(line, wall_s):
            raise SandboxDied(f"the sandbox's machine failed: {error[-300:]}")


def _packed(paths: tuple[str, ...], max_bytes: int) -> bytes:
    """Return an archive of this machine's directories under their own paths.

    Raises:
        SettingsError: the archive has more than `max_bytes` bytes.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as files:
        for path in paths:
            files.add(path, filter=_readable)
            if buffer.tell() > max_bytes:
                raise SettingsError(
                    f"setting environment.sandbox.read_only: {path} and those before it have more than "
                    f"disk_mb, {max_bytes >> 20} MiB, to copy to each sandbox"
                )
    return buffer.getvalue()


def _readable(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return an archive entry owned by root and readable by everyone."""
    entry.uid = entry.gid = 0
    entry.mode |= 0o555 if entry.isdir() or entry.mode & 0o100 else 0o444
    return entry
