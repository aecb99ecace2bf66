"""Defines the six operations of a sandbox: start, exec, write, read, snapshot, stop.

A sandbox isolates one episode: a directory, and the processes that the model's commands or a harness start in
it. Providers start sandboxes; `pool.py` leases them to episodes. Paths are absolute within the sandbox, or
relative to the working directory, in which commands run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Ended = Literal["", "time", "output", "memory", "files"]
"""Limit that ended a command; empty: the command ended on its own."""


class SandboxDied(RuntimeError):
    """Sandbox that no longer responds. The episode fails without a reward."""


class SandboxFull(ValueError):
    """File or directory that exceeds the size limit of the sandbox, or of a read."""


@dataclass(frozen=True, slots=True)
class Start:
    """Settings of a new sandbox."""

    lease_s: float
    """Maximum lifetime, seconds; the sandbox ends with its lease, even if its worker is dead."""
    endpoint: str = ""
    """URL on this machine, `http://127.0.0.1:PORT`, reachable from the sandbox under the same URL; all other
    addresses are blocked. Empty: no network."""
    snapshot: str = ""
    """Result of an earlier sandbox's `snapshot`, with the initial files. Empty: no files."""
    image: str = ""
    """Image named by the task. Empty: the configured image."""


@dataclass(frozen=True, slots=True)
class SandboxCommand:
    """Program to run in a sandbox."""

    command: tuple[str, ...]
    """Program and arguments; no shell is used."""
    wall_s: float
    """Timeout, seconds; the program is then killed."""
    output: int
    """Output limit, bytes; the program is then killed."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""


@dataclass(frozen=True, slots=True)
class Executed:
    """Result of a command."""

    output: bytes
    """Combined standard output and standard error; untrusted."""
    ended: Ended
    status: int
    """Exit status; negative: signal number."""


class Sandbox(Protocol):
    """Running sandbox; one call at a time."""

    async def exec(self, order: SandboxCommand) -> Executed:
        """Run a command. Processes that it started end at the latest when the sandbox stops.

        Cancelling the call ends the command; the sandbox may be unusable afterwards.

        Raises:
            SandboxDied: the sandbox does not respond, or a command killed it.
        """

    async def write(self, path: str, data: bytes) -> None:
        """Write a file, creating its directories.

        Raises:
            SandboxDied: the sandbox does not respond.
            SandboxFull: the file exceeds the size limit, or its path is invalid.
        """

    async def read(self, path: str, most: int) -> bytes | None:
        """Return the contents of a regular file; None if there is none.

        Raises:
            SandboxDied: the sandbox does not respond.
            SandboxFull: the file has more than `most` bytes.
        """

    async def snapshot(self) -> str:
        """Return a value for `Start.snapshot`: a name, or the files themselves. Processes are not saved.

        Raises:
            SandboxDied: the sandbox does not respond.
            SandboxFull: the files are too large.
        """

    async def stop(self) -> None:
        """End all processes in the sandbox, and remove its files. Idempotent."""


class Provider(Protocol):
    """Provider of one kind of sandboxes."""

    async def start(self, start: Start) -> Sandbox:
        """Start a sandbox; if cancelled, leave none behind.

        Raises:
            SettingsError: the configured machine or service cannot start sandboxes.
            SandboxDied: this start failed.
        """

    async def clear_left(self) -> int:
        """Remove sandboxes of dead workers; return their number."""

    async def forget(self, snapshot: str) -> None:
        """Remove a snapshot that is no longer needed."""

    async def close(self) -> None:
        """Close connections to a service. Idempotent."""
