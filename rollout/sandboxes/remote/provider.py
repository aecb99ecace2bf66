"""Starts sandboxes on cloud providers' machines, and removes sandboxes of dead workers.

A machine has the labels `tether_host`, which identifies this host's programs directory, and `tether_folder`,
a folder in it that the worker keeps locked while it lives. The machine also has a lease of its provider, in
case no worker starts on this host again.
"""

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from yarl import URL

from protocol.errors import SettingsError
from protocol.network.addresses import is_loopback
from rollout.config import SandboxConfig
from rollout.programs.folder import ProgramFolder, clear_left_folders, programs_directory
from rollout.sandboxes.base import SandboxDied, Start
from rollout.sandboxes.pool import complete_stop, create_or_remove
from rollout.sandboxes.remote.machine import RemoteMachine, RemoteSandbox

IDENTITY = "host"
"""File in the programs directory with this host's label."""


class RemoteProvider(ABC):
    """Provider whose sandboxes are cloud machines."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config

    async def start(self, start: Start) -> RemoteSandbox:
        host = endpoint_host(start.endpoint)
        folder = ProgramFolder()
        sandbox: RemoteSandbox | None = None
        began = False
        try:
            labels = {**host_label(), "tether_folder": str(folder.path)}
            machine = await create_or_remove(self._created(start, host, labels), _removed, (SandboxDied,))
            sandbox = RemoteSandbox(machine, self._config, folder)
            await sandbox.begin(start)
            began = True
        finally:
            if sandbox is None:
                folder.close()
            elif not began:
                await complete_stop(sandbox.stop())
        return sandbox

    async def clear_left(self) -> int:
        clear_left_folders()
        count = 0
        async for machine, labels in self._listed(host_label()):
            if not Path(labels["tether_folder"]).exists():
                await machine.remove()
                count += 1
        return count

    async def forget(self, snapshot: str) -> None:  # noqa: B027
        pass  # the snapshot is the files themselves

    @abstractmethod
    async def close(self) -> None:
        """Close connections. Idempotent."""

    @abstractmethod
    async def _created(self, start: Start, host: str, labels: Mapping[str, str]) -> RemoteMachine:
        """Create a machine that ends after its lease and reaches only `host`; empty: no network."""

    @abstractmethod
    def _listed(self, labels: Mapping[str, str]) -> AsyncIterator[tuple[RemoteMachine, Mapping[str, str]]]:
        """Yield (machine, its labels) for machines with all of the given labels."""


def endpoint_host(endpoint: str) -> str:
    """Return the host of an endpoint that other machines must reach.

    Raises:
        SettingsError: the endpoint is on loopback.
    """
    host = URL(endpoint).host or "" if endpoint else ""
    if host and is_loopback(host):
        raise SettingsError(
            f"setting environment.advertise: a sandbox on a machine elsewhere does not reach {endpoint}; "
            "set it to the endpoint's address for other machines"
        )
    return host


def host_label() -> dict[str, str]:
    """Return the label of this host's machines: a random name, because host names may collide.

    It is stored in the programs directory, so its readers also find the label's folders.
    """
    stored = programs_directory() / IDENTITY
    if not stored.exists():
        temporary = stored.with_name(f"{IDENTITY}-{secrets.token_hex(16)}")
        temporary.write_text(temporary.name)
        with suppress(FileExistsError):  # another worker was first
            stored.hardlink_to(temporary)
        temporary.unlink()
    return {"tether_host": stored.read_text()}


@contextmanager
def translated_errors(
    company: str, refused: type[Exception], failed: tuple[type[Exception], ...]
) -> Iterator[None]:
    """Convert the exceptions of a provider's package.

    Args:
        company: provider name, as it spells it.
        refused: exception for a wrong or missing key.
        failed: other exceptions of its calls.
    """
    try:
        yield
    except refused as error:
        raise SettingsError(
            f"setting environment.sandbox.name: {company.lower()!r}: {str(error)[:300]}"
        ) from None
    except TimeoutError:
        raise SandboxDied(f"{company}: it did not answer in time") from None
    except failed as error:
        raise SandboxDied(f"{company}: {type(error).__name__}: {str(error)[:300]}") from None


async def _removed(machine: RemoteMachine) -> None:
    await machine.remove()
