"""Starts a program in a process group and a directory of its own, and ends everything that it started.

It gets no variables of the worker but a few, since the others may have credentials. Processes that left its
process group are found by a variable that they inherited (`left_processes.py`). If the worker is killed, the
kernel kills the program, and the next worker kills the program's other processes (`clear_left_folders`).
"""

import asyncio
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import SettingsError
from protocol.host.prctl import tied_to_this_process
from rollout.programs.folder import ProgramFolder
from rollout.programs.left_processes import MARK, Sweeper
from rollout.programs.owner import Owner

PASSED = ("HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV")
"""Variables of the rollout worker that a program gets as they are; PATH begins with the worker's Python."""
MAX_OUTPUT = 300
"""Bytes of a failed program's output that are reported, the last ones."""
MAX_LINE = 2**20
"""Bytes of a line that a program writes to the worker."""


class ProgramKilled(RuntimeError):
    """A signal ended a program, which has not failed by itself: it may be run again on the record."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings with which programs are started."""

    command: tuple[str, ...]
    """The program and its arguments; no shell."""
    directory: str = ""
    """First directory that is searched for Python modules. Empty: the rollout worker's directory."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """More environment variables."""
    sweeper: Sweeper = field(default_factory=Sweeper, compare=False)
    """Kills processes that the programs leave."""
    owner: Owner | None = None
    """User that they run as. None: the rollout worker's user."""

    def environ(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a program, with `more` last."""
        modules = [self.directory or os.getcwd(), *(entry for entry in sys.path if _is_user_path(entry))]
        return {
            **{name: os.environ[name] for name in PASSED if name in os.environ},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(modules)),
            **(self.owner.variables if self.owner is not None else {}),
            **self.variables,
            **more,
        }

    @property
    def is_there(self) -> bool:
        """Whether the program is found where it will be searched for; the user that it gets is not asked."""
        return shutil.which(self.command[0], path=self.environ({})["PATH"]) is not None

    def before_exec(self) -> Callable[[], None]:
        """Return the `preexec_fn` of a program: it gets its user, and ends with this process."""
        tie, owner = tied_to_this_process(signal.SIGKILL), self.owner

        def before() -> None:
            if owner is not None:
                owner.become()
            tie()  # after that: a change of the user would undo it

        return before


class Program:
    """One process and what it starts, in an empty directory that is removed after it."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._folder = ProgramFolder(launch.owner)
        self._output = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def folder(self) -> Path:
        """The working directory."""
        return self._folder.path

    def write(self, name: str, text: str) -> Path:
        """Write a file into the working directory before the start, for the program; return its path."""
        return self._folder.write(name, text)

    def read(self, name: str, most: int) -> bytes | None:
        """Return the contents of a file in the program's working directory; None if there is none.

        Raises:
            OSError: it is not a regular file.
            ValueError: it has more than `most` bytes.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a link may lead to a file of the worker's user
        try:
            handle = os.open(self.folder / name, flags)
        except FileNotFoundError:
            return None
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(f"{name} is no regular file")
            if len(data := file.read(most + 1)) > most:
                raise ValueError(f"{name} has more than {most} bytes")
            return data

    @property
    def process(self) -> asyncio.subprocess.Process:
        """The process. Raises RuntimeError before the start."""
        if self._process is None:
            raise RuntimeError(f"{self._launch.command[0]} has not been started")
        return self._process

    @property
    def source(self) -> asyncio.StreamReader:
        """The program's standard output; it was started with `lines`."""
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def sink(self) -> asyncio.StreamWriter:
        """The program's standard input; it was started with `lines`."""
        assert self.process.stdin is not None
        return self.process.stdin

    async def start(self, variables: Mapping[str, str], *, lines: bool = False) -> None:
        """Start it.

        Args:
            variables: environment variables besides those of `Launch`.
            lines: whether standard input and output are pipes to this process; otherwise there is no
                input, and the output is kept together with standard error.

        Raises:
            SettingsError: there is no such program, or it cannot be run.
        """
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._launch.command,
                stdin=pipe if lines else asyncio.subprocess.DEVNULL,
                stdout=pipe if lines else self._output.fileno(),
                stderr=self._output.fileno(),
                cwd=self.folder,
                env=self._launch.environ({**variables, MARK: self.folder.name}),
                start_new_session=True,
                preexec_fn=self._launch.before_exec(),
                limit=MAX_LINE,
            )
        except OSError as error:
            raise SettingsError(
                f"setting environment.options.command: {self._launch.command[0]} cannot be started: "
                f"{error.strerror}"
            ) from None

    async def ended(self) -> None:
        """Wait for its end.

        Raises:
            ProgramKilled: a signal ended it.
            RuntimeError: its exit status is not 0; says the end of its output.
        """
        status = await self.process.wait()
        if status:
            error = ProgramKilled if status < 0 else RuntimeError
            raise error(f"{self._launch.command[0]} ended with status {status}: {self.said()}")

    def said(self) -> str:
        """Return the end of what it wrote since the start or the last `forget`."""
        end = os.lseek(self._output.fileno(), 0, os.SEEK_END)
        tail = os.pread(self._output.fileno(), MAX_OUTPUT, max(0, end - MAX_OUTPUT))
        return tail.decode(errors="replace").strip()

    def forget(self) -> None:
        """Discard what it wrote."""
        self._output.truncate(0)

    def kill(self) -> None:
        """Kill it and its process group, as far as they run."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill it and what it started, and remove its directory."""
        try:
            if self._process is not None:
                self.kill()
                await self._process.wait()
                await self._launch.sweeper.sweep(self.folder)
        finally:
            self._output.close()
            self._folder.close()


def _is_user_path(entry: str) -> bool:
    """Return whether a directory of `sys.path` is neither Python's nor one of installed packages."""
    path = Path(entry)
    return path.is_absolute() and not any(
        path.is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix)
    )
