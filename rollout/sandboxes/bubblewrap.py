"""Runs an episode's commands under bubblewrap (`bwrap`), as an ordinary user or as root.

Each sandbox has one `bwrap` process with its own namespaces for mounts, processes, network, IPC and host
name. It runs `inside.py`, which runs the commands. Files are in memory and end with the sandbox, which ends
with the worker. The model's endpoint is a mounted Unix socket, reached through a port on the sandbox's
loopback.
"""

import asyncio
import json
import os
import platform
import secrets
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from protocol.errors import SettingsError
from rollout.config import SandboxConfig
from rollout.programs.folder import clear_left_folders
from rollout.programs.left_processes import Sweeper
from rollout.programs.program import Launch, Program
from rollout.sandboxes.base import Start
from rollout.sandboxes.relay import Relay
from rollout.sandboxes.served import FIRST_UID, INSIDE, SOCKET, SOCKET_FILE, WORK, ServedSandbox

ROOT = (
    "--cap-drop",
    "ALL",
    *(part for name in ("SETUID", "SETGID", "KILL") for part in ("--cap-add", f"CAP_{name}")),
)
"""Arguments as root: no user namespace, and the capabilities to run commands as another user."""
USER = ("--unshare-user", "--disable-userns")
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
"""Paths of the machine mounted read-only in a sandbox, if they exist."""
REFUSED = {"mount": 165, "memfd_create": 319, "fsopen": 430, "fsmount": 432, "memfd_secret": 447}
"""System calls for memory that is attributed to no process and would evade the memory limit (x86-64)."""
_X86_64, _X32 = 0xC000003E, 0x40000000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ENOSYS = 0x7FFF0000, 0x00050000 | 38
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data


class BubblewrapProvider:
    """Provider `bubblewrap`."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config, self._sweeper = config, Sweeper()

    async def start(self, start: Start) -> ServedSandbox:
        binary = shutil.which("bwrap")
        if binary is None:
            raise SettingsError(
                "setting environment.sandbox.name: 'bubblewrap' needs the program bwrap, which is not on the "
                "PATH: apt install bubblewrap"
            )
        if start.image:
            raise SettingsError(
                f"setting environment.sandbox.name: a task needs the image {start.image!r}, and 'bubblewrap' "
                "has none; 'container' does"
            )
        relay = Relay(start.endpoint) if start.endpoint else None
        launch = Launch((binary, *self._arguments(start, relay)), sweeper=self._sweeper)
        program = Program(launch)
        sandbox = ServedSandbox(program, relay, self._config.disk_mb << 20)
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
        pass  # the snapshot is the files themselves

    async def close(self) -> None:
        pass

    def _arguments(self, start: Start, relay: Relay | None) -> list[str]:
        """Return the arguments of `bwrap`, followed by the serving program."""
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
            "filter": _memory_filter().hex(),
        }
        return [
            "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-net", "--unshare-ipc",
            "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox", "--clearenv",
            *(ROOT if is_root else USER),
            "--proc", "/proc", "--dev", "/dev",
            *(part for path in ("/tmp", WORK, *config.directories) for part in _in_memory(path, size)),
            *_mounts(config.read_only),
            *_mounted("inside.py", "/run/inside.py"),
            *([] if relay is None else ["--ro-bind", SOCKET_FILE, SOCKET]),
            "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK,
            *(part for name, value in _variables().items() for part in ("--setenv", name, value)),
            "--", os.path.realpath(sys.executable), "-I", "/run/inside.py", "serve", json.dumps(settings),
        ]  # fmt: skip


def _memory_filter() -> bytes:
    """Return a seccomp filter as an array of struct sock_filter; empty on processors other than x86-64.

    It rejects all calls of other ABIs, such as 32-bit ones, whose numbers differ.
    """
    if platform.machine() != "x86_64":
        return b""
    refused = sorted(REFUSED.values())
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 0, len(refused) + 3, _X86_64),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, len(refused) + 1, 0, _X32),
        *((_EQUAL, len(refused) - at, 0, number) for at, number in enumerate(refused)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ENOSYS),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _mounts(extra_paths: Iterable[str]) -> Iterator[str]:
    """Yield arguments that mount directories of this machine read-only at the same path."""
    for path in (*SYSTEM, *dict.fromkeys((sys.base_prefix, sys.prefix)), *extra_paths):
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        elif os.path.exists(path):
            yield from _mounted(path, path)


def _mounted(source: str, path: str) -> Iterator[str]:
    """Yield arguments that mount `source` at `path`."""
    yield from (*_parents(path), "--ro-bind", source, path)


def _in_memory(path: str, size: str) -> Iterator[str]:
    """Yield arguments for a world-writable in-memory directory of `size` bytes."""
    yield from (*_parents(path), "--perms", "1777", "--size", size, "--tmpfs", path)


def _parents(path: str) -> Iterator[str]:
    """Yield arguments for a path's parents, which any user may traverse."""
    for parent in reversed(Path(path).parents[:-1]):
        yield from ("--perms", "0755", "--dir", str(parent))


def _variables() -> dict[str, str]:
    return {
        "PATH": os.pathsep.join(
            [f"{sys.prefix}/bin", f"{sys.base_prefix}/bin", "/usr/local/bin", os.defpath]
        ),
        "HOME": WORK,
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
    }
