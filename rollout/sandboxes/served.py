"""Sends requests to `inside.py`, which runs the commands of one sandbox, over a pipe or connection."""

import asyncio
import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rollout.sandboxes.base import Executed, SandboxCommand, SandboxDied, SandboxFull
from rollout.sandboxes.relay import Relay

INSIDE = Path(__file__).with_name("inside.py").read_text()
WORK, SOCKET, SOCKET_FILE = "/sandbox", "/run/endpoint.sock", "endpoint.sock"
"""Working directory and endpoint socket in the sandbox, and the socket's name in the mounted folder."""
FIRST_UID = 1 << 20
"""Commands run as a random user above this id, unique to the sandbox, if the program may change users."""
START_S = 60.0
"""Timeout of a sandbox start on a busy machine, seconds."""
GRACE_S = 30.0
"""Seconds to wait for a reply beyond the command's own timeout."""
PACK_BYTES_PER_S = 1 << 20
"""Minimum packing rate on a busy machine, bytes per second."""


class Channel(Protocol):
    """Connection to the program in a sandbox, which can also end the sandbox."""

    @property
    def source(self) -> asyncio.StreamReader:
        """Output of the program."""

    @property
    def sink(self) -> asyncio.StreamWriter:
        """Input of the program."""

    def kill(self) -> None:
        """End the sandbox, or start ending it, without waiting."""

    def last_output(self) -> str:
        """Return the end of the program's error output."""

    async def close(self) -> None:
        """End the sandbox, and remove its files. Idempotent."""


class RpcSandbox(ABC):
    """Sandbox whose operations are requests to `inside.py`."""

    def __init__(self, max_pack_bytes: int) -> None:
        """Args: max_pack_bytes: size limit of the packed files, bytes."""
        self._max_pack_bytes = max_pack_bytes

    async def exec(self, order: SandboxCommand) -> Executed:
        fields, output = await self._request(
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
        await self._request({"do": "write", "path": path}, data)

    async def read(self, path: str, most: int) -> bytes | None:
        fields, data = await self._request({"do": "read", "path": path, "most": most})
        return data if fields["found"] else None

    async def snapshot(self) -> str:
        _, archive = await self._request({"do": "pack", "most": self._max_pack_bytes}, wall_s=self.pack_s)
        return base64.b64encode(archive).decode()

    async def unpack(self, snapshot: str) -> None:
        """Unpack a result of `snapshot`."""
        await self._request(
            {"do": "unpack", "most": self._max_pack_bytes}, base64.b64decode(snapshot), self.pack_s
        )

    @property
    def pack_s(self) -> float:
        """Timeout for packing or unpacking all files, seconds."""
        return GRACE_S + self._max_pack_bytes / PACK_BYTES_PER_S

    @abstractmethod
    async def _request(
        self, request: Mapping[str, Any], data: bytes = b"", wall_s: float = GRACE_S
    ) -> tuple[dict[str, Any], bytes]:
        """Return the reply to a request.

        Raises:
            SandboxDied: there was no reply.
            SandboxFull: the reply is an error.
        """


class ServedSandbox(RpcSandbox):
    """Sandbox whose program serves one episode."""

    def __init__(self, channel: Channel, relay: Relay | None, max_pack_bytes: int) -> None:
        """Args: channel: to its program; relay: to its endpoint; max_pack_bytes: as in `RpcSandbox`."""
        super().__init__(max_pack_bytes)
        self._channel, self._relay = channel, relay
        self._busy = asyncio.Lock()
        self._stopped = False
        self.began = False
        """Whether the sandbox serves requests, with the files of its snapshot."""

    async def stop(self) -> None:
        self._stopped = True
        try:
            await self._channel.close()
        finally:
            if self._relay is not None:
                await self._relay.close()

    async def begin(self, snapshot: str) -> None:
        """Wait until the program serves requests, and unpack a snapshot."""
        async with self._busy:
            try:
                async with asyncio.timeout(START_S):
                    await self._answer()
            except TimeoutError:
                raise SandboxDied(f"it did not start within {START_S:g} s") from None
        if snapshot:
            await self.unpack(snapshot)
        self.began = True

    async def _request(
        self, request: Mapping[str, Any], data: bytes = b"", wall_s: float = GRACE_S
    ) -> tuple[dict[str, Any], bytes]:
        """Return the reply to a request. After a cancellation or timeout, kill the sandbox."""
        async with self._busy:
            if self._stopped:
                raise SandboxDied("the sandbox was stopped")
            sink = self._channel.sink
            try:
                async with asyncio.timeout(wall_s):
                    sink.write(json.dumps({**request, "bytes": len(data)}).encode() + b"\n" + data)
                    with suppress(ConnectionError):  # `_answer` reports the reason
                        await sink.drain()
                    fields, found = await self._answer()
            except TimeoutError:
                self._channel.kill()
                raise SandboxDied(f"it did not answer within {wall_s:g} s") from None
            except asyncio.CancelledError:
                self._channel.kill()
                raise
        if "error" in fields:
            raise SandboxFull(fields["error"])
        return fields, found

    async def _answer(self) -> tuple[dict[str, Any], bytes]:
        source = self._channel.source
        try:
            fields = json.loads(await source.readline())
            return fields, await source.readexactly(fields["bytes"])
        except (ValueError, TypeError, KeyError, asyncio.IncompleteReadError):
            last_output = self._channel.last_output()
            raise SandboxDied(f"the sandbox has ended: {last_output or 'killed without output'}") from None
