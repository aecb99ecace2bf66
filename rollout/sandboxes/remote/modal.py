"""Runs an episode's commands in a Modal sandbox, with the package `modal`.

The package reads MODAL_TOKEN_ID and MODAL_TOKEN_SECRET. Setting `image` is a registry image with `python3`
(Modal's default has it). Sandboxes belong to the Modal app `tether`.
"""

import asyncio
import ipaddress
import math
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import modal
from modal.stream_type import StreamType

from protocol.errors import SettingsError
from rollout.config import SandboxConfig
from rollout.sandboxes.base import SandboxDied, Start
from rollout.sandboxes.pool import CREATE_S
from rollout.sandboxes.remote.machine import RemoteMachine
from rollout.sandboxes.remote.provider import RemoteProvider, translated_errors

APP = "tether"
CHUNK = 1 << 20
"""Bytes of a file to send at once."""

_translated = partial(translated_errors, "Modal", modal.exception.AuthError, (modal.exception.Error, OSError))


class ModalMachine:
    """Sandbox of Modal."""

    def __init__(self, sandbox: modal.Sandbox) -> None:
        self._sandbox = sandbox

    async def run(self, line: str, wall_s: float) -> str:
        with _translated():
            return await _ended(await self._began(line, wall_s, StreamType.DEVNULL))

    async def put(self, path: str, data: bytes) -> None:
        with _translated():
            process = await self._began(f"cat > {shlex.quote(path)}", CREATE_S, StreamType.DEVNULL)
            for first in range(0, len(data), CHUNK):
                process.stdin.write(data[first : first + CHUNK])
                await process.stdin.drain.aio()
            process.stdin.write_eof()
            await process.stdin.drain.aio()
            if error := await _ended(process):
                raise SandboxDied(f"Modal: {path} was not written: {error}")

    async def get(self, path: str) -> bytes:
        with _translated():
            process = await self._began(f"cat {shlex.quote(path)}", CREATE_S, StreamType.PIPE)
            data = bytes(await process.stdout.read.aio())
            if error := await _ended(process):
                raise SandboxDied(f"Modal: {path} was not read: {error}")
            return data

    async def remove(self) -> None:
        with _translated():
            await self._sandbox.terminate.aio()
            await self._sandbox.detach.aio()

    async def _began(self, line: str, wall_s: float, output: StreamType) -> Any:
        """Start a shell line, and return its process."""
        words = ("sh", "-c", line)
        return await self._sandbox.exec.aio(*words, stdout=output, timeout=math.ceil(wall_s), text=False)


class ModalProvider(RemoteProvider):
    """Provider `modal`."""

    def __init__(self, config: SandboxConfig) -> None:
        """Store the settings.

        Raises:
            SettingsError: `service` is set.
        """
        super().__init__(config)
        if config.service:
            raise SettingsError(
                f"setting environment.sandbox.service: {config.service!r}, but the package modal takes "
                "another service from MODAL_SERVER_URL; remove the setting"
            )

    async def close(self) -> None:
        pass  # the package has one client per process

    async def _created(self, start: Start, host: str, labels: Mapping[str, str]) -> RemoteMachine:
        image = start.image or self._config.image
        with _translated():
            async with asyncio.timeout(CREATE_S):
                app = await _app()
                with _refusing(image):
                    return ModalMachine(
                        await modal.Sandbox.create.aio(
                            app=app,
                            image=modal.Image.from_registry(image) if image else None,
                            tags=dict(labels),
                            timeout=math.ceil(start.lease_s),
                            **(_reached(host) if host else {"block_network": True}),
                        )
                    )

    async def _listed(
        self, labels: Mapping[str, str]
    ) -> AsyncIterator[tuple[RemoteMachine, Mapping[str, str]]]:
        with _translated():
            async with asyncio.timeout(CREATE_S):
                app = await _app()
                listing = modal.Sandbox.list.aio(app_id=app.app_id, tags=dict(labels))
                found = [(ModalMachine(sandbox), await sandbox.get_tags.aio()) async for sandbox in listing]
        for machine in found:
            yield machine


async def _app() -> modal.App:
    return await modal.App.lookup.aio(APP, create_if_missing=True)


def _reached(host: str) -> dict[str, list[str]]:
    """Return the parameter that restricts a machine's network to one host (address or name)."""
    try:
        return {"outbound_cidr_allowlist": [str(ipaddress.ip_network(host))]}
    except ValueError:
        return {"outbound_domain_allowlist": [host]}


async def _ended(process: Any) -> str:
    """Wait for a process; return the error text, empty if the status is 0."""
    error = bytes(await process.stderr.read.aio())
    status = await process.wait.aio()
    return f"status {status}: {error[-300:].decode(errors='replace')}" if status else ""


@contextmanager
def _refusing(image: str) -> Iterator[None]:
    """Convert the package's rejection of a new machine into an error of the image setting."""
    try:
        yield
    except modal.exception.ConflictError:
        raise  # a transient state conflict
    except (modal.exception.InvalidError, modal.exception.NotFoundError) as error:
        raise SettingsError(
            f"setting environment.sandbox.image: {image!r}: Modal: {str(error)[:300]}"
        ) from None
