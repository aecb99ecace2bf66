"""Runs an episode's commands in an E2B sandbox, with the package `e2b`, which reads the key E2B_API_KEY.

Setting `image` is the template, with `python3` (the default one has it). `service` is the API URL, if it is
not E2B's own.
"""

import math
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any

import httpx
from e2b import AsyncSandbox, CommandExitException, SandboxQuery
from e2b.exceptions import AuthenticationException, SandboxException, ServiceBusyException

from rollout.config import SandboxConfig
from rollout.sandboxes.base import Start
from rollout.sandboxes.pool import CREATE_S
from rollout.sandboxes.remote.machine import RemoteMachine
from rollout.sandboxes.remote.provider import RemoteProvider, translated_errors

ALL = "0.0.0.0/0"

_translated = partial(
    translated_errors,
    "E2B",
    AuthenticationException,
    (SandboxException, ServiceBusyException, httpx.HTTPError, OSError),
)


class E2BMachine:
    """Sandbox of E2B."""

    def __init__(self, sandbox: AsyncSandbox) -> None:
        self._sandbox = sandbox

    async def run(self, line: str, wall_s: float) -> str:
        with _translated():
            try:
                await self._sandbox.commands.run(line, user="root", timeout=wall_s)
            except CommandExitException as error:
                return f"status {error.exit_code}: {error.stderr}"
            return ""

    async def put(self, path: str, data: bytes) -> None:
        with _translated():
            await self._sandbox.files.write(path, data, user="root")

    async def get(self, path: str) -> bytes:
        with _translated():
            return bytes(await self._sandbox.files.read(path, format="bytes", user="root"))

    async def remove(self) -> None:
        with _translated():
            await self._sandbox.kill()


class ListedMachine(E2BMachine):
    """Sandbox known only by its id."""

    def __init__(self, name: str, words: Mapping[str, Any]) -> None:
        self._name, self._words = name, words

    async def remove(self) -> None:
        with _translated():
            await AsyncSandbox.kill(self._name, **self._words)


class E2BProvider(RemoteProvider):
    """Provider `e2b`."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self._words = {"request_timeout": CREATE_S, **({"api_url": config.service} if config.service else {})}

    async def close(self) -> None:
        pass  # the package manages connections per event loop

    async def _created(self, start: Start, host: str, labels: Mapping[str, str]) -> RemoteMachine:
        network = {"allow_out": [host], "deny_out": [ALL]} if host else {"deny_out": [ALL]}
        with _translated():
            return E2BMachine(
                await AsyncSandbox.create(
                    start.image or self._config.image or None,
                    timeout=math.ceil(start.lease_s),
                    metadata=dict(labels),
                    network=network,
                    **self._words,
                )
            )

    async def _listed(
        self, labels: Mapping[str, str]
    ) -> AsyncIterator[tuple[RemoteMachine, Mapping[str, str]]]:
        pages = AsyncSandbox.list(SandboxQuery(metadata=dict(labels)), **self._words)
        while pages.has_next:
            with _translated():
                found = await pages.next_items()
            for item in found:
                yield ListedMachine(item.sandbox_id, self._words), item.metadata
