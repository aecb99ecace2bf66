"""Runs an episode's commands in a Daytona sandbox, with the package `daytona`.

The package reads the key DAYTONA_API_KEY. Setting `image` is a Daytona snapshot with `python3` (the default
one has it). `service` is the API URL, if it is not Daytona's own.
"""

import ipaddress
import math
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import partial

import aiohttp
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromSnapshotParams,
    DaytonaAuthenticationError,
    DaytonaConfig,
    DaytonaError,
    DaytonaNotFoundError,
    ListSandboxesQuery,
)

from protocol.errors import SettingsError
from rollout.config import SandboxConfig
from rollout.sandboxes.base import Start
from rollout.sandboxes.pool import CREATE_S
from rollout.sandboxes.remote.machine import RemoteMachine
from rollout.sandboxes.remote.provider import RemoteProvider, translated_errors

_translated = partial(
    translated_errors,
    "Daytona",
    DaytonaAuthenticationError,
    (DaytonaError, aiohttp.ClientError, OSError),
)


class DaytonaMachine:
    """Sandbox of Daytona."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox

    async def run(self, line: str, wall_s: float) -> str:
        with _translated():
            ended = await self._sandbox.process.exec(f"sh -c {shlex.quote(line)}", timeout=math.ceil(wall_s))
        return f"status {ended.exit_code}: {ended.result}" if ended.exit_code else ""

    async def put(self, path: str, data: bytes) -> None:
        with _translated():
            await self._sandbox.fs.upload_file(data, path, CREATE_S)

    async def get(self, path: str) -> bytes:
        with _translated():
            return bytes(await self._sandbox.fs.download_file(path, CREATE_S))

    async def remove(self) -> None:
        with _translated(), suppress(DaytonaNotFoundError):
            await self._sandbox.delete(timeout=CREATE_S)


class DaytonaProvider(RemoteProvider):
    """Provider `daytona`."""

    def __init__(self, config: SandboxConfig) -> None:
        """Create the client.

        Raises:
            SettingsError: the key is missing.
        """
        super().__init__(config)
        words = {"api_url": config.service} if config.service else {}
        try:
            self._client = AsyncDaytona(DaytonaConfig(use_deprecated_polling=True, **words))
        except DaytonaError as error:
            raise SettingsError(f"setting environment.sandbox.name: 'daytona': {error}") from None

    async def close(self) -> None:
        await self._client.close()

    async def _created(self, start: Start, host: str, labels: Mapping[str, str]) -> RemoteMachine:
        given = CreateSandboxFromSnapshotParams(
            snapshot=start.image or self._config.image or None,
            os_user="root",
            labels=dict(labels),
            ephemeral=True,
            auto_stop_interval=0,  # the interval counts from the last call, but a command may run longer
            ttl_minutes=max(1, math.ceil(start.lease_s / 60)),
            **(_reached(host) if host else {"network_block_all": True}),
        )
        with _translated():
            return DaytonaMachine(await self._client.create(given, timeout=CREATE_S))

    async def _listed(
        self, labels: Mapping[str, str]
    ) -> AsyncIterator[tuple[RemoteMachine, Mapping[str, str]]]:
        with _translated():
            async for sandbox in self._client.list(ListSandboxesQuery(labels=dict(labels)), CREATE_S):
                yield DaytonaMachine(sandbox), sandbox.labels


def _reached(host: str) -> dict[str, str]:
    """Return the parameter that restricts a machine's network to one host (address or name)."""
    try:
        return {"network_allow_list": str(ipaddress.ip_network(host))}
    except ValueError:
        return {"domain_allow_list": host}
