"""Runs an episode's commands under bubblewrap (`bwrap`), as an ordinary user or as root.

One `bwrap` for each sandbox has namespaces of its own for mounts, processes, network, IPC and host name, and
runs `inside.py`, which runs the commands. Files are in memory and end with it; it ends with the worker. The
model's endpoint is a Unix socket that is mounted, and a port on the sandbox's own loopback that leads there.
"""

import asyncio
import base64
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from protocol.errors import SettingsError
from rollout.config import SandboxConfig
from rollout.programs.folder import clear_left_folders
from rollout.programs.left_processes import Sweeper
from rollout.programs.program import Launch, Program
from rollout.sandboxes.base import Executed, SandboxCommand, SandboxDied, SandboxFull, Start
from rollout.sandboxes.relay import Relay

WORK, SOCKET, SOCKET_FILE = "/sandbox", "/run/endpoint.sock", "endpoint.sock"
ROOT = (
    "--cap-drop",
    "ALL",
    *(part for name in ("SETUID", "SETGID", "KILL") for part in ("--cap-add", f"CAP_{name}")),
)
"""As root: it needs no namespace of users, and keeps what it takes to be another user for commands."""
USER = ("--unshare-user", "--disable-userns")
INSIDE = Path(__file__).with_name("inside.py").read_text()
FIRST_UID = 1 << 20
"""As root, the commands of a sandbox run as a user above it that no other sandbox has."""
START_S = 60.0
"""Seconds for a sandbox to start on a busy machine."""
GRACE_S = 30.0
"""Seconds beyond a command's own for the answer to come."""
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
)
"""Paths of the machine that can be read in a sandbox, as far as they exist."""


class BubblewrapSandbox:
    """A `bwrap` that serves one episode."""

    def __init__(self, program: Program, relay: Relay | None, pack: int) -> None:
        self._program, self._relay, self._pack = program, relay, pack
        self._busy = asyncio.Lock()

    async def exec(self, order: SandboxCommand) -> Executed:
        fields, output = await self._asked(
            {
                "do": "exec",
                "command": [part.replace("\0", "") for part in order.command],
                "wall_s": order.wall_s,
                "output": order.output,
                "variables": dict(order.variables),
            },
            wall_s=order.wall_s + GRACE_S,
        )
        return Executed(output, fields["ended"], fields["status"])

    async def write(self, path: str, data: bytes) -> None:
        await self._asked({"do": "write", "path": path}, data)

    async def read(self, path: str, most: int) -> bytes | None:
        fields, data = await self._asked({"do": "read", "path": path, "most": most})
        return data if fields["found"] else None

    async def snapshot(self) -> str:
        _, archive = await self._asked({"do": "pack", "most": self._pack})
        return base64.b64encode(archive).decode()

    async def stop(self) -> None:
        try:
            await self._program.close()
        finally:
            if self._relay is not None:
                await self._relay.close()

    async def begin(self, snapshot: str) -> None:
        """Wait until it serves, and unpack a snapshot."""
        async with self._busy:
            try:
                async with asyncio.timeout(START_S):
                    await self._answer()
            except TimeoutError:
                raise SandboxDied(f"it did not start within {START_S:g} s") from None
        if snapshot:
            await self._asked({"do": "unpack"}, base64.b64decode(snapshot))

    async def _asked(
        self, request: Mapping[str, Any], data: bytes = b"", wall_s: float = GRACE_S
    ) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a request. Cancelled or late, it kills the sandbox, whose state is unknown."""
        async with self._busy:
            sink = self._program.process.stdin
            assert sink is not None  # it was started with pipes
            try:
                async with asyncio.timeout(wall_s):
                    sink.write(json.dumps({**request, "bytes": len(data)}).encode() + b"\n" + data)
                    with suppress(ConnectionError):  # `_answer` says why
                        await sink.drain()
                    fields, found = await self._answer()
            except TimeoutError:
                self._program.kill()
                raise SandboxDied(f"it did not answer within {wall_s:g} s") from None
            except asyncio.CancelledError:
                self._program.kill()
                raise
        if "error" in fields:
            raise SandboxFull(fields["error"])
        return fields, found

    async def _answer(self) -> tuple[dict[str, Any], bytes]:
        source = self._program.process.stdout
        assert source is not None
        try:
            fields = json.loads(await source.readline())
            return fields, await source.readexactly(fields["bytes"])
        except (ValueError, TypeError, KeyError, asyncio.IncompleteReadError):
            said = self._program.said()
            raise SandboxDied(f"the sandbox has ended: {said or 'killed, without a word'}") from None


class BubblewrapProvider:
    """Provider `bubblewrap`."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config, self._sweeper = config, Sweeper()

    async def start(self, start: Start) -> BubblewrapSandbox:
        binary = shutil.which("bwrap")
        if binary is None:
            raise SettingsError(
                "setting environment.sandbox.name: 'bubblewrap' needs the program bwrap, which is not on the "
                "PATH: apt install bubblewrap"
            )
        relay = Relay(start.endpoint) if start.endpoint else None
        launch = Launch((binary, *self._arguments(start, relay)), sweeper=self._sweeper)
        program = Program(launch)
        sandbox = BubblewrapSandbox(program, relay, self._config.disk_mb << 20)
        try:
            if relay is not None:
                await relay.open(program.folder / SOCKET_FILE)
            program.write("inside.py", INSIDE)
            await program.start({}, lines=True)
            await sandbox.begin(start.snapshot)
        except BaseException:
            await sandbox.stop()
            raise
        return sandbox

    async def clear_left(self) -> int:
        return await asyncio.to_thread(clear_left_folders)

    async def forget(self, snapshot: str) -> None:
        pass  # it is the files themselves

    async def close(self) -> None:
        pass

    def _arguments(self, start: Start, relay: Relay | None) -> list[str]:
        """Return the arguments of `bwrap`, and behind them the program that serves."""
        is_root, config = os.geteuid() == 0, self._config
        size = str(config.disk_mb << 20)
        settings = {
            "lease_s": start.lease_s,
            "port": 0 if relay is None else relay.port,
            "socket": SOCKET,
            "work": WORK,
            "uid": FIRST_UID + secrets.randbelow(1 << 30) if is_root else 0,
            "cpu_s": config.cpu_s,
            "processes": config.processes,
            "memory_mb": config.memory_mb,
        }
        return [
            "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-net", "--unshare-ipc",
            "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox", "--clearenv",
            *(ROOT if is_root else USER),
            *_mounts(config.read_only),
            "--proc", "/proc", "--dev", "/dev",
            "--perms", "1777", "--size", size, "--tmpfs", "/tmp",
            "--perms", "1777", "--size", size, "--tmpfs", WORK,
            *_mounted("--ro-bind", "inside.py", "/run/inside.py"),
            *([] if relay is None else ["--ro-bind", SOCKET_FILE, SOCKET]),
            "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK,
            *(part for name, value in _variables().items() for part in ("--setenv", name, value)),
            "--", os.path.realpath(sys.executable), "-I", "/run/inside.py", "serve", json.dumps(settings),
        ]  # fmt: skip


def _mounts(more: Iterable[str]) -> Iterator[str]:
    """Yield arguments that make directories of this machine readable under their own names."""
    for path in (*SYSTEM, *dict.fromkeys((sys.base_prefix, sys.prefix)), *more):
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.exists(path):
            yield from _mounted("--ro-bind", path, path)


def _mounted(how: str, source: str, path: str) -> Iterator[str]:
    """Yield arguments that mount `source` at `path`, whose parents any user may pass."""
    for parent in reversed(Path(path).parents[:-1]):
        yield from ("--perms", "0755", "--dir", str(parent))
    yield from (how, source, path)


def _variables() -> dict[str, str]:
    return {
        "PATH": os.pathsep.join(
            [f"{sys.prefix}/bin", f"{sys.base_prefix}/bin", "/usr/local/bin", os.defpath]
        ),
        "HOME": WORK,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
    }
