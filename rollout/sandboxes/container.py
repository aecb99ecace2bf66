"""Runs an episode's commands in a container of Docker, or of Podman by its Docker API, with `docker-py`.

The container has no network, no capabilities for commands, a read-only image with in-memory directories, and
limits on memory and processes. Its first process is `inside.py`, as in bubblewrap, so the image needs Python.
A label names a folder that the worker has locked. If the folder's lock is free, the container's worker is
dead.
"""

import asyncio
import json
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import Any

import docker
import docker.errors
import docker.types
import requests

from protocol.errors import SettingsError
from rollout.config import SandboxConfig
from rollout.programs.folder import ProgramFolder, clear_left_folders, programs_directory
from rollout.sandboxes.base import SandboxDied, Start
from rollout.sandboxes.pool import CREATE_S, complete_stop, create_or_remove
from rollout.sandboxes.relay import Relay
from rollout.sandboxes.served import FIRST_UID, INSIDE, SOCKET, SOCKET_FILE, WORK, ServedSandbox

LABEL = "tether.folder"
"""Container label with the folder that its worker has locked."""
HEADER = struct.Struct(">BxxxL")
"""Header of each output chunk: stream (1: standard output, 2: standard error), size in bytes."""
MAX_ERROR_OUTPUT = 300
REMOVALS = 6
"""Attempts at removing a container, within a few seconds."""
FAILED = (docker.errors.DockerException, requests.RequestException)
"""Exceptions of a call: service errors, and failed or timed-out connections."""


class ContainerChannel:
    """Attached standard input and output of a container."""

    def __init__(self, container: Any, folder: ProgramFolder) -> None:
        self._container, self._folder = container, folder
        self.source = asyncio.StreamReader()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._errors = b""

    @property
    def sink(self) -> asyncio.StreamWriter:
        assert self._writer is not None  # set by `open`
        return self._writer

    async def open(self, attached: socket.socket) -> None:
        """Start reading, before the container starts."""
        attached.setblocking(False)
        reader, self._writer = await asyncio.open_connection(sock=attached)
        # no task group: the task reads until `close`
        self._reading = asyncio.get_running_loop().create_task(self._read(reader), name="sandbox.container")

    def kill(self) -> None:
        """Close the container's standard input, which ends it; `close` removes it."""
        if self._writer is not None:
            self._writer.transport.abort()

    def last_output(self) -> str:
        return self._errors.decode(errors="replace").strip()

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self.kill()
        try:
            await _removed(self._container)
        finally:
            self._folder.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Demultiplex the container's output into standard output and errors."""
        try:
            while True:
                kind, size = HEADER.unpack(await reader.readexactly(HEADER.size))
                data = await reader.readexactly(size)
                if kind == 1:
                    self.source.feed_data(data)
                else:
                    self._errors = (self._errors + data)[-MAX_ERROR_OUTPUT:]
        except (asyncio.IncompleteReadError, OSError):
            self.source.feed_eof()


class ContainerProvider:
    """Provider `container`."""

    def __init__(self, config: SandboxConfig) -> None:
        """Connect to the service.

        Raises:
            SettingsError: the service does not respond, or no image is configured.
        """
        self._config = config
        if not config.image:
            raise SettingsError("setting environment.sandbox.image: 'container' needs the name of an image")
        try:
            if config.service:
                self._client = docker.DockerClient(base_url=config.service, timeout=CREATE_S)
            else:
                self._client = docker.from_env(timeout=CREATE_S)
            self._client.ping()
        except (docker.errors.DockerException, OSError) as error:
            raise SettingsError(
                f"setting environment.sandbox.service: Docker or Podman do not answer at "
                f"{config.service or 'DOCKER_HOST'}: {str(error)[:200]}"
            ) from None

    async def start(self, start: Start) -> ServedSandbox:
        folder = ProgramFolder()
        relay = Relay(start.endpoint) if start.endpoint else None
        sandbox: ServedSandbox | None = None
        try:
            if relay is not None:
                await relay.open(folder.path / SOCKET_FILE)
            creation = asyncio.to_thread(self._create, start, folder, relay)
            container = await create_or_remove(creation, _removed, FAILED)
            channel = ContainerChannel(container, folder)
            sandbox = ServedSandbox(channel, relay, self._config.disk_mb << 20)
            await channel.open(await asyncio.to_thread(_attached, container))
            await asyncio.to_thread(container.start)
            await sandbox.begin(start.snapshot)
        except docker.errors.ImageNotFound as error:
            raise SettingsError(f"setting environment.sandbox.image: {error.explanation}") from None
        except FAILED as error:
            raise SandboxDied(f"the container did not start: {str(error)[-300:]}") from None
        finally:
            if sandbox is None or not sandbox.began:
                await complete_stop(sandbox.stop() if sandbox is not None else _closed(folder, relay))
        return sandbox

    async def clear_left(self) -> int:
        try:
            left = await asyncio.to_thread(self._left)
        except FAILED as error:
            raise SandboxDied(f"the service did not list containers: {str(error)[-300:]}") from None
        async with asyncio.TaskGroup() as tasks:  # the first start waits for the removal
            removing = [tasks.create_task(_is_removed(container)) for container in left]
        return sum(task.result() for task in removing)

    async def forget(self, snapshot: str) -> None:
        pass  # the snapshot is the files themselves

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    def _create(self, start: Start, folder: ProgramFolder, relay: Relay | None) -> Any:
        config = self._config
        settings = {
            "lease_s": start.lease_s,
            "port": 0 if relay is None else relay.port,
            "socket": SOCKET,
            "work": WORK,
            "uid": FIRST_UID + secrets.randbelow(1 << 24),
            "cpu_s": config.cpu_s,
            "processes": config.processes,
            "memory_mb": config.memory_mb,
            "filter": "",  # the kernel's limit counts all memory
        }
        mounts = {path: {"bind": path, "mode": "ro"} for path in config.read_only}
        if relay is not None:
            mounts[str(folder.path / SOCKET_FILE)] = {"bind": SOCKET, "mode": "ro"}
        written = (WORK, "/tmp", *config.directories)
        in_memory = f"rw,exec,nosuid,nodev,size={config.disk_mb}m,mode=1777"
        return self._client.containers.create(
            start.image or config.image,
            ["python3", "-I", "-c", INSIDE, "serve", json.dumps(settings)],
            stdin_open=True,
            user="0:0",
            environment={"HOME": WORK, "TMPDIR": "/tmp", "LANG": "C.UTF-8"},
            labels={LABEL: str(folder.path)},
            working_dir="/",
            network_mode="none",
            read_only=True,
            tmpfs=dict.fromkeys(written, in_memory),
            volumes=mounts,
            mem_limit=f"{config.memory_mb + len(written) * config.disk_mb + INSIDE_MB}m",
            pids_limit=config.processes + 16,
            cap_drop=["ALL"],
            cap_add=["SETUID", "SETGID", "KILL"],
            security_opt=["no-new-privileges"],
            ulimits=[
                docker.types.Ulimit(name=name, soft=limit, hard=limit)
                for name, limit in (("nofile", 1024), ("nproc", config.processes + 16))
            ],
        )

    def _left(self) -> list[Any]:
        """Return this user's containers whose folders are no longer locked."""
        clear_left_folders()
        here = str(programs_directory())
        found = self._client.containers.list(all=True, sparse=True, filters={"label": LABEL})
        folders = [(container.attrs.get("Labels") or {}).get(LABEL, "") for container in found]
        return [
            container
            for container, folder in zip(found, folders, strict=True)
            if os.path.dirname(folder) == here and not os.path.exists(folder)
        ]


INSIDE_MB = 64
"""Memory of the serving program, MiB; in-memory files count towards the limit, too."""


def _attached(container: Any) -> socket.socket:
    """Return a connection to a container's standard input, output and error."""
    found = container.attach_socket(params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    raw = getattr(found, "_sock", found)
    return socket.socket(raw.family, raw.type, fileno=raw.detach())


def _remove(container: Any) -> None:
    """Remove a container; retry, because a service may refuse while the container is ending."""
    for attempt in range(REMOVALS):
        try:
            with suppress(docker.errors.NotFound):
                container.remove(force=True, v=True)
            return
        except FAILED:
            if attempt == REMOVALS - 1:
                raise
            time.sleep(0.1 * 2**attempt)


async def _removed(container: Any) -> None:
    await asyncio.to_thread(_remove, container)


async def _is_removed(container: Any) -> bool:
    """Remove a container; return whether it succeeded."""
    with suppress(*FAILED):
        await _removed(container)
        return True
    return False


async def _closed(folder: ProgramFolder, relay: Relay | None) -> None:
    folder.close()
    if relay is not None:
        await relay.close()
