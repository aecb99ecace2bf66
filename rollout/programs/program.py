"""Starts a program in its own process group and directory, and ends everything that it started.

The program inherits only a few variables of the worker, because others may contain credentials. Processes
that left its process group are found by an inherited variable (`left_processes.py`). If the worker is killed,
the kernel kills the program, and the next worker kills the program's other processes (`clear_left_folders`).
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
"""Variables of the rollout worker that a program inherits; PATH begins with the worker's Python."""
MAX_OUTPUT = 300
"""Bytes from the end of a failed program's output to report."""
MAX_LINE = 2**20
"""Maximum size of a line from a program, bytes."""


class ProgramKilled(RuntimeError):
    """Program ended by a signal rather than by its own failure; it may be run again on the record."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Settings for starting programs."""

    command: tuple[str, ...]
    """Program and arguments; no shell is used."""
    directory: str = ""
    """First directory to search for Python modules. Empty: the rollout worker's working directory."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""
    sweeper: Sweeper = field(default_factory=Sweeper, compare=False)
    """Kills processes that programs leave behind."""
    owner: Owner | None = None
    """User that programs run as; None: the rollout worker's user."""

    def environ(self, extra_variables: Mapping[str, str]) -> dict[str, str]:
        """Return a program's environment; `extra_variables` has precedence."""
        modules = [self.directory or os.getcwd(), *(entry for entry in sys.path if _is_user_path(entry))]
        return {
            **{name: os.environ[name] for name in PASSED if name in os.environ},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(modules)),
            **(self.owner.variables if self.owner is not None else {}),
            **self.variables,
            **extra_variables,
        }

    @property
    def is_there(self) -> bool:
        """Whether the program is found in its PATH; permissions of its user are not checked."""
        return shutil.which(self.command[0], path=self.environ({})["PATH"]) is not None

    def before_exec(self) -> Callable[[], None]:
        """Return the `preexec_fn` of a program: switch to its user, and tie its life to this process."""
        tie, owner = tied_to_this_process(signal.SIGKILL), self.owner

        def before() -> None:
            if owner is not None:
                owner.become()
            tie()  # last, because a change of the user would undo it

        return before


class Program:
    """Process with its descendants, in an empty directory that is removed afterwards."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._folder = ProgramFolder(launch.owner)
        self._output = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def folder(self) -> Path:
        """Working directory."""
        return self._folder.path

    def write(self, name: str, text: str) -> Path:
        """Write a file into the working directory before the start; return its path."""
        return self._folder.write(name, text)

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the contents of a file in the working directory; None if there is none.

        Raises:
            OSError: the file is not a regular file.
            ValueError: the file has more than `max_bytes` bytes.
        """
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a link may lead to a file of the worker's user
        try:
            handle = os.open(self.folder / name, flags)
        except FileNotFoundError:
            return None
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(f"{name} is not a regular file")
            if len(data := file.read(max_bytes + 1)) > max_bytes:
                raise ValueError(f"{name} has more than {max_bytes} bytes")
            return data

    @property
    def process(self) -> asyncio.subprocess.Process:
        """Running process. Raises RuntimeError before the start."""
        if self._process is None:
            raise RuntimeError(f"{self._launch.command[0]} has not been started")
        return self._process

    @property
    def source(self) -> asyncio.StreamReader:
        """Standard output of a program started with `lines`."""
        assert self.process.stdout is not None
        return self.process.stdout

    @property
    def sink(self) -> asyncio.StreamWriter:
        """Standard input of a program started with `lines`."""
        assert self.process.stdin is not None
        return self.process.stdin

    async def start(self, variables: Mapping[str, str], *, lines: bool = False) -> None:
        """Start the program.

        Args:
            variables: environment variables in addition to those of `Launch`.
            lines: whether standard input and output are pipes to this process. Otherwise there is no input,
                and output is captured together with standard error.

        Raises:
            SettingsError: the program is missing or not executable.
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
        """Wait for the program's end.

        Raises:
            ProgramKilled: a signal ended the program.
            RuntimeError: the exit status is not 0; the message quotes the program's output.
        """
        status = await self.process.wait()
        if status:
            error = ProgramKilled if status < 0 else RuntimeError
            raise error(f"{self._launch.command[0]} ended with status {status}: {self.last_output()}")

    def last_output(self) -> str:
        """Return the end of the output since the start or the last `forget`."""
        end = os.lseek(self._output.fileno(), 0, os.SEEK_END)
        tail = os.pread(self._output.fileno(), MAX_OUTPUT, max(0, end - MAX_OUTPUT))
        return tail.decode(errors="replace").strip()

    def forget(self) -> None:
        """Discard the output so far."""
        self._output.truncate(0)

    def kill(self) -> None:
        """Kill the process and its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Kill the process and its descendants, and remove its directory."""
        try:
            if self._process is not None:
                self.kill()
                await self._process.wait()
                await self._launch.sweeper.sweep(self.folder)
        finally:
            self._output.close()
            self._folder.close()


def _is_user_path(entry: str) -> bool:
    """Return whether a directory of `sys.path` belongs neither to Python nor to installed packages."""
    path = Path(entry)
    return path.is_absolute() and not any(
        path.is_relative_to(prefix) for prefix in (sys.prefix, sys.base_prefix)
    )
