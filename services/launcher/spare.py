"""Keeps spares: processes with imported modules of a service that replace a dead process.

The kind of a spare is its module and its environment variables, which libraries read at import. Each kind has
at most one spare. A spare forks the services, so that a run imports once. A spare that cannot fork
(`services.spare.can_fork`) becomes the service itself, in its own session.
"""

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from protocol.host.machine import memory_available
from protocol.host.prctl import adopting_orphans
from services.launcher.session import ForkedProcess, ServiceProcess, kill_session, start_session
from services.spare import FORKS, READY

log = logging.getLogger("tether.up")

REPLACE_DELAY_S = 5.0
"""Seconds before a used spare is replaced, so that its imports do not slow down the service's start."""
RETRY_S = 60.0
"""Seconds before a spare is restarted that died unused or lacked memory."""
MAX_TRIES = 3
"""Number of consecutive spares of a kind that may die unused before no more are started."""
READY_S = 300.0
"""Timeout of a spare's imports, seconds."""
IMPORT_WAIT_S = 30.0
"""Seconds that a service waits for a spare's imports; a new process would take about as long."""
ORDER_S = 10.0
"""Timeout of a fork and of sending its order, seconds."""
MIN_FREE_BYTES = 4 << 30
"""Free memory on the host required to start a spare, bytes."""

Kind = tuple[str, tuple[tuple[str, str], ...], frozenset[str]]
"""Module, environment variables, and names of withheld variables."""


@dataclass(slots=True)
class Spare:
    """Process that waits to become a service or to fork services."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    forks: bool
    used: asyncio.Event
    """Set at the first service from this spare; a spare that cannot fork is the service from then on."""


class Spares:
    """Spares of a fleet."""

    def __init__(self, logs: Path) -> None:
        """Start without spares; spares write `spare.NAME.log` to `logs`, NAME being a service."""
        self._logs = logs
        self._kinds: dict[Kind, str] = {}
        """Kind to keep a spare of -> first service of the kind."""
        self._ready: dict[Kind, Spare] = {}
        self._imports: dict[Kind, asyncio.Event] = {}
        """Kind whose spare is importing -> event set once it is ready, has failed, or is late."""
        self._tasks: asyncio.TaskGroup | None = None
        self._importing = asyncio.Lock()
        """Held during imports: several spares at a time would take all processors from the run."""
        self._ordering = asyncio.Lock()
        """Held while a spare starts a service, so that answers do not mix."""

    def add(
        self, name: str, module: str, environ: Mapping[str, str], withheld: frozenset[str] = frozenset()
    ) -> None:
        """Keep a spare for the service `name` and all services of the same kind."""
        kind = _kind(module, environ, withheld)
        if kind in self._kinds:
            return
        self._kinds[kind] = name
        if self._tasks is not None:
            self._tasks.create_task(self._keep_loop(kind), name=f"spare-{name}")

    async def run(self, wait_started: Callable[[], Awaitable[None]]) -> None:
        """Keep the spares until cancelled; then kill the unused ones.

        Args:
            wait_started: returns once the run makes steps. Spares start only then, because they would slow
                down the run's start.
        """
        await wait_started()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for kind, name in self._kinds.items():
                    self._tasks.create_task(self._keep_loop(kind), name=f"spare-{name}")
                await asyncio.Event().wait()
        finally:
            self._tasks = None

    async def take(
        self,
        name: str,
        module: str,
        environ: Mapping[str, str],
        log_path: Path,
        withheld: frozenset[str] = frozenset(),
    ) -> ServiceProcess | None:
        """Start the service `name` from a spare, with output appended to `log_path`; None without a spare.

        Waits up to `IMPORT_WAIT_S` for a spare that is importing, since a new process would repeat the same
        imports.
        """
        kind = _kind(module, environ, withheld)
        if importing := self._imports.get(kind):
            await importing.wait()
            if kind in self._imports:  # the spare may hang
                log_file = self._log(self._kinds[kind])
                log.warning(
                    "spare.late name=%s seconds=%g instead=a new process see=%s",
                    name,
                    IMPORT_WAIT_S,
                    log_file,
                )
        async with self._ordering:
            spare = self._ready.get(kind)
            if spare is None:
                return None
            if not spare.forks:
                del self._ready[kind]
                spare.used.set()
            with contextlib.suppress(OSError, TimeoutError, ValueError), contextlib.ExitStack() as undo:
                undo.callback(kill_session, spare.process)  # also ends a fork without an order
                async with asyncio.timeout(ORDER_S):
                    process = await _fork(spare) if spare.forks else spare.process
                    spare.writer.write(json.dumps({"name": name, "log": str(log_path)}).encode() + b"\n")
                    await spare.writer.drain()
                undo.pop_all()
                spare.used.set()
                log.info("service.from_spare name=%s pid=%d", name, process.pid)
                return process
        return None

    async def _keep_loop(self, kind: Kind) -> None:
        name, tries = self._kinds[kind], 0
        while tries < MAX_TRIES:
            if not _has_free_memory():
                log.warning("spare.no_memory name=%s needs_mb=%d", name, MIN_FREE_BYTES >> 20)
            elif await self._keep_one(kind):
                tries = 0
                await asyncio.sleep(REPLACE_DELAY_S)
                continue
            else:
                tries += 1
                log.warning("spare.died name=%s tries=%d see=%s", name, tries, self._log(name))
            await asyncio.sleep(RETRY_S)

    async def _keep_one(self, kind: Kind) -> bool:
        """Start a spare and wait until it is used; return False if it failed or died unused."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with self._importing, asyncio.timeout(READY_S):
                    with self._mark_importing(kind):
                        spare = await self._start(kind)
                        stack.push_async_callback(self._end, kind, spare)
                        answer = await spare.reader.readline()
                        if answer not in (READY, FORKS):
                            return False
                        spare.forks = answer == FORKS
                        self._ready[kind] = spare
                log.info("spare.ready name=%s pid=%d", self._kinds[kind], spare.process.pid)
                if spare.forks:
                    await spare.process.wait()
                else:  # the spare closes its end when it becomes the service or dies
                    await spare.reader.read()
            except ConnectionError:  # killed before it read its order
                pass
            except (OSError, TimeoutError) as error:
                log.warning("spare.not_ready name=%s error=%r", self._kinds[kind], error)
                return False
            return spare.used.is_set()

    @contextlib.contextmanager
    def _mark_importing(self, kind: Kind) -> Iterator[None]:
        """Mark a kind as importing within the block, so that `take` waits."""
        self._imports[kind] = event = asyncio.Event()
        timer = asyncio.get_running_loop().call_later(IMPORT_WAIT_S, event.set)
        try:
            yield
        finally:
            timer.cancel()
            del self._imports[kind]
            event.set()

    async def _end(self, kind: Kind, spare: Spare) -> None:
        """Remove a spare; kill it unless it has become a service."""
        self._ready.pop(kind, None)
        spare.writer.close()
        if spare.forks or not spare.used.is_set():
            kill_session(spare.process)
            await spare.process.wait()

    async def _start(self, kind: Kind) -> Spare:
        module, environ, withheld = kind
        name = self._kinds[kind]
        own_end, spare_end = socket.socketpair()
        with spare_end, contextlib.ExitStack() as cleanup:
            cleanup.callback(own_end.close)
            with self._log(name).open("wb") as output:
                process = await start_session(
                    ("services.spare", module),
                    dict(environ),
                    f"spare.{name}",
                    output,
                    spare_end.fileno(),
                    withheld,
                )
            cleanup.callback(kill_session, process)
            reader, writer = await asyncio.open_unix_connection(sock=own_end)
            cleanup.pop_all()
        return Spare(process, reader, writer, False, asyncio.Event())

    def _log(self, name: str) -> Path:
        return self._logs / f"spare.{name}.log"


async def _fork(spare: Spare) -> ForkedProcess:
    """Make a spare fork; return the child, which waits for its order.

    Raises:
        ValueError: the spare has died.
    """
    with adopting_orphans():
        spare.writer.write(b"\n")
        await spare.writer.drain()
        return ForkedProcess(int(await spare.reader.readline()))


def _kind(module: str, environ: Mapping[str, str], withheld: frozenset[str]) -> Kind:
    return module, tuple(sorted(environ.items())), withheld


def _has_free_memory() -> bool:
    try:
        return memory_available() >= MIN_FREE_BYTES
    except OSError:  # unknown on systems other than Linux
        return True
