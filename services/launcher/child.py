"""Supervises one service of `tether up`: starts, logs, restarts and stops it.

A service runs in its own session. It gets SIGTERM when the supervisor dies (Linux parent-death signal).
SIGTERM requests a drain; SIGKILL to the session ends remaining processes.
"""

import asyncio
import contextlib
import logging
import re
import shutil
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import SettingsError, TetherError
from services.launcher.session import ForkedProcess, ServiceProcess, kill_session, start_session
from services.launcher.spare import Spares
from services.runtime.errors import EXIT_SETTINGS, EXIT_UNAVAILABLE, FIRST_SIGNAL_CODE

log = logging.getLogger("tether.up")

BACKOFF_S = (0.2, 5.0)
RESTART_WINDOW_S = 60.0
MIN_PROGRESS_S = 600.0
"""Seconds after which a process has made progress: its death resets the count of equal errors."""
MAX_LOG_BYTES = 32 << 20
"""Size above which a service's log is truncated; its content replaces NAME.log.1."""
CAUSE_CHARACTERS = 60
"""Length at which errors are cut to be compared: an engine's error has the end of its log, which varies."""
EARLY_EXIT_S = 10.0
"""After a spare's fork fails within this time in seconds, the next start uses a new process."""
LOG_CHECK_S = 30.0
"""Seconds between two checks of a running service's log size."""


class ServiceFailed(TetherError):
    """A service died more often than `services.restarts` allows, in a minute or with the same error."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """Description of one process to supervise."""

    name: str
    """Name of the service, such as rollout.0: name of its log file and value of `TETHER_INSTANCE`."""
    module: str
    """Started as `python -m MODULE`."""
    environ: Mapping[str, str]
    """Environment variables of this service, which override inherited ones."""
    finishes: bool = False
    """Whether exit code 0 ends the service; otherwise it is restarted."""
    optional: bool = False
    """Whether the run continues without the service if it dies too often."""
    registers: bool = True
    """Whether the service registers in the ledger."""
    withheld: frozenset[str] = frozenset()
    """Environment variables that the service does not inherit: credentials of other services."""


class SupervisedProcess:
    """A service with at most one live process."""

    def __init__(
        self,
        spec: ServiceSpec,
        log_path: Path,
        restarts: int,
        is_over: Callable[[], Awaitable[bool]] | None = None,
        spares: Spares | None = None,
        on_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the service without starting it.

        Args:
            spec: description of the service.
            log_path: file to which its output is appended.
            restarts: maximum number of restarts within `RESTART_WINDOW_S`.
            is_over: returns whether the run is over. A service with `finishes` that another process drained
                before the end of the run is restarted.
            spares: processes that can replace it when it dies; None always starts a new process.
            on_exit: called after each exit of its process.
        """
        self.spec = spec
        self.log_path = log_path
        self.restarts = 0
        """Number of restarts so far."""
        self.finished = asyncio.Event()
        """Set when `keep_running` has returned."""
        self.failure_reason = ""
        """Why an optional service is no longer restarted; empty while it runs."""
        self._max_restarts = restarts
        self._deaths: deque[float] = deque()
        self._equal_deaths = 0
        """Number of consecutive deaths with the same error."""
        self._error = ""
        """Last output line of the last process, with numbers replaced."""
        self._process: ServiceProcess | None = None
        self._stopping = False
        self._is_over = is_over
        self._spares = spares or Spares(log_path.parent)
        self._on_exit = on_exit
        self._fork_failed = False
        """Whether the last process was a fork of a spare and failed within `EARLY_EXIT_S`."""
        self._log_start = 0
        """Offset in the log at which the output of the last process begins."""
        self._is_log_cut = False
        """Whether the log was truncated while the last process wrote to it."""

    @property
    def registers(self) -> bool:
        """Whether the service registers in the ledger."""
        return self.spec.registers

    @property
    def name(self) -> str:
        """Name of the service, such as rollout.0 or trainer."""
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Process id; None while no process is alive."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def keep_running(self) -> None:
        """Start the service and restart it when it dies, until it finishes or is stopped.

        An optional service that dies too often is given up, which is logged.

        Raises:
            SettingsError: the service ended with the exit code for wrong settings.
            ServiceFailed: the service died too often within `RESTART_WINDOW_S`, or with the same error.
        """
        try:
            await self._keep_running()
        except (SettingsError, ServiceFailed) as error:
            if not self.spec.optional:
                raise
            self.failure_reason = str(error)
            log.error("service.given_up name=%s reason=%s", self.spec.name, error)
        self.finished.set()

    async def _keep_running(self) -> None:
        while not self._stopping:
            began_s = time.monotonic()
            code = await self._run_once()
            if self._stopping or (
                code == 0 and self.spec.finishes and (self._is_over is None or await self._is_over())
            ):
                break
            last_line = self._last_line()
            if code == EXIT_SETTINGS:
                message = last_line.removeprefix("tether ")
                raise SettingsError(message or f"{self.spec.name}: wrong settings, see {self.log_path}")
            if frequency := self._count_death(code, last_line, time.monotonic() - began_s):
                raise ServiceFailed(
                    f"{self.spec.name} died {frequency}, last with exit code {code}: "
                    f"{last_line or 'no output'} (see {self.log_path})"
                )
            self.restarts += 1
            log.warning(
                "service.died name=%s code=%s restarts=%d said=%s",
                self.spec.name,
                code,
                self.restarts,
                last_line,
            )
            await asyncio.sleep(backoff_s(len(self._deaths)))

    def _count_death(self, code: int, last_line: str, lived_s: float) -> str:
        """Count a death; return how often the service died if that is too often, else an empty string.

        Counting equal errors catches a service that starts slowly and always fails: it would otherwise die
        once a minute forever.
        """
        now = time.monotonic()
        self._deaths.append(now)
        while now - self._deaths[0] > RESTART_WINDOW_S:
            self._deaths.popleft()
        is_error = 0 < code < FIRST_SIGNAL_CODE and code != EXIT_UNAVAILABLE
        error = re.sub(r"\d+", "N", last_line)[:CAUSE_CHARACTERS] if is_error else ""
        is_equal = error and error == self._error and lived_s < MIN_PROGRESS_S
        self._equal_deaths = self._equal_deaths + 1 if is_equal else 1
        self._error = error
        if len(self._deaths) > self._max_restarts:
            return f"{len(self._deaths)} times in a minute"
        if self._equal_deaths > max(1, self._max_restarts):
            return f"{self._equal_deaths} times in a row with the same error"
        return ""

    async def _run_once(self) -> int:
        await asyncio.to_thread(cut_log, self.log_path)
        self._is_log_cut = False
        with self.log_path.open("ab") as output:
            self._log_start = output.tell()
            spec = self.spec
            spare = None
            if not self._fork_failed:
                spare = await self._spares.take(
                    spec.name, spec.module, spec.environ, self.log_path, spec.withheld
                )
            self._process = spare or await start_session(
                (spec.module,), spec.environ, spec.name, output, asyncio.subprocess.DEVNULL, spec.withheld
            )
        if self._stopping:  # stopped during its start, before it had work
            self._kill_session()
        began_s = time.monotonic()
        try:
            code = await self._wait_for_exit(self._process)
            is_early = code not in (0, -signal.SIGKILL) and time.monotonic() - began_s < EARLY_EXIT_S
            self._fork_failed = is_early and isinstance(self._process, ForkedProcess)
            return code
        finally:
            self._kill_session()
            await self._process.wait()
            self._on_exit()

    async def _wait_for_exit(self, process: ServiceProcess) -> int:
        """Wait for the process and return its exit code; truncate its log in the meantime."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOG_CHECK_S):
                    return await process.wait()
            if await asyncio.to_thread(cut_log, self.log_path):
                self._log_start, self._is_log_cut = 0, True

    def _last_line(self) -> str:
        """Return the last line of the last process, also if the log was truncated after the line."""
        line = last_log_line(self.log_path, start=self._log_start)
        return line or (last_log_line(older_log(self.log_path)) if self._is_log_cut else "")

    async def stop(self, drain_s: float) -> None:
        """Send SIGTERM and wait `drain_s` seconds; then kill the whole session.

        A cancelled call can be repeated. The signal is sent only once, because a second one ends the drain.
        """
        was_stopping, self._stopping = self._stopping, True
        process = self._process
        if process is None or process.returncode is not None:
            return
        if not was_stopping:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(drain_s):
                await process.wait()
        except TimeoutError:
            log.warning("service.drain_timeout name=%s seconds=%.0f", self.spec.name, drain_s)
        self._kill_session()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await process.wait()

    def kill(self) -> None:
        """Kill the session of the service at once and do not restart it."""
        self._stopping = True
        if self.pid is not None:  # the number of one that has ended may be another process's by now
            self._kill_session()

    def _kill_session(self) -> None:
        """Send SIGKILL to every remaining process in the session of the service."""
        if self._process is not None:
            kill_session(self._process)


def backoff_s(deaths: int) -> float:
    """Return the delay in seconds before the restart after `deaths` deaths within `RESTART_WINDOW_S`."""
    return min(BACKOFF_S[0] * 2.0 ** min(deaths - 1, 10), BACKOFF_S[1])


def older_log(log_path: Path) -> Path:
    """Return the path of the truncated part of a log."""
    return log_path.with_name(f"{log_path.name}.1")


def cut_log(log_path: Path, limit: int = MAX_LOG_BYTES) -> bool:
    """Move the content of a log above `limit` bytes to a copy; return whether the log was truncated.

    The service may be writing: it appends, and so continues at the new end. Without room for the copy the log
    is not truncated, which is logged.
    """
    try:
        if not log_path.exists() or log_path.stat().st_size <= limit:
            return False
        with log_path.open("r+b") as log_file, older_log(log_path).open("wb") as older:
            shutil.copyfileobj(log_file, older)
            log_file.truncate(0)
    except OSError as error:
        log.warning("log.not_cut path=%s error=%s", log_path, error)
        return False
    return True


def last_log_line(log_path: Path, limit: int = 1000, start: int = 0) -> str:
    """Return the last line of a service's log after byte `start`, at most `limit` characters.

    Lines that begin with "tether " have priority, because torchrun writes more lines after the service's last
    one.
    """
    lines: Sequence[str] = []
    with contextlib.suppress(OSError):
        with open(log_path, "rb") as file:
            file.seek(max(start, log_path.stat().st_size - 8192))
            lines = [
                line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()
            ]
    own_lines = [line for line in lines if line.startswith("tether ")]
    return next(iter((own_lines or lines)[-1:]), "")[:limit]
