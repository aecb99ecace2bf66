"""Defines the six calls of a sandbox: start, exec, write, read, snapshot, stop.

A sandbox is the world of one episode: a directory, and the processes that a model's commands or a harness
start there. A provider starts sandboxes; `pool.py` leases them to episodes. Paths are relative to the working
directory, in which commands run, or absolute within the sandbox.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Ended = Literal["", "time", "output", "memory", "files"]
"""The limit for which a command was ended; empty: it ended by itself."""


class SandboxDied(RuntimeError):
    """A sandbox that does not answer any more: the episode has failed, which is no reward."""


class SandboxFull(ValueError):
    """A file or directory that does not fit: into the sandbox, or into what may be read from it."""


@dataclass(frozen=True, slots=True)
class Start:
    """Settings of a new sandbox."""

    lease_s: float
    """How long it may live, seconds; it ends with its lease, also without its worker."""
    endpoint: str = ""
    """URL on this machine that it reaches, `http://127.0.0.1:PORT`, under the same URL; nowhere else. Empty:
    no network at all."""
    snapshot: str = ""
    """What `snapshot` of an earlier sandbox returned: it begins with its files. Empty: with none."""
    image: str = ""
    """Image that the task names. Empty: the one of the settings."""


@dataclass(frozen=True, slots=True)
class SandboxCommand:
    """Program that is run in a sandbox."""

    command: tuple[str, ...]
    """Program and arguments; no shell."""
    wall_s: float
    """Seconds after which it is killed."""
    output: int
    """Bytes of output after which it is killed."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More environment variables."""


@dataclass(frozen=True, slots=True)
class Executed:
    """End of a command."""

    output: bytes
    """Standard output and error together; the command may have written anything."""
    ended: Ended
    status: int
    """Exit status; negative: the signal."""


class Sandbox(Protocol):
    """A running sandbox; one call at a time."""

    async def exec(self, order: SandboxCommand) -> Executed:
        """Run a command; what it started ends with it at the latest when the sandbox stops.

        Cancelling the call ends the command; the sandbox may be of no use after it.

        Raises:
            SandboxDied: it does not answer, or was killed by what ran in it.
        """

    async def write(self, path: str, data: bytes) -> None:
        """Write a file; its directories are made.

        Raises:
            SandboxDied: as for `exec`.
            SandboxFull: it does not fit, or there is no such place.
        """

    async def read(self, path: str, most: int) -> bytes | None:
        """Return the contents of a regular file; None if there is none.

        Raises:
            SandboxDied: as for `exec`.
            SandboxFull: it has more than `most` bytes.
        """

    async def snapshot(self) -> str:
        """Return a name, or the files themselves, with which `Start.snapshot` begins; only files are kept.

        Raises:
            SandboxDied: as for `exec`.
            SandboxFull: the files are too large.
        """

    async def stop(self) -> None:
        """End everything that runs in it, and remove its files. Idempotent."""


class Provider(Protocol):
    """Starts sandboxes of one kind."""

    async def start(self, start: Start) -> Sandbox:
        """Start one; cancelled, it leaves none behind.

        Raises:
            SettingsError: this machine or the service cannot do it at all, as configured.
            SandboxDied: it did not start this time.
        """

    async def clear_left(self) -> int:
        """Remove sandboxes whose workers have died; return how many there were."""

    async def forget(self, snapshot: str) -> None:
        """Remove a snapshot that no episode needs any more."""

    async def close(self) -> None:
        """Close connections to a service. Idempotent."""
