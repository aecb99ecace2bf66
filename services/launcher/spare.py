"""Keeps spares: processes that have imported a service's modules, and replace one that dies.

A spare is of a kind: a module and its environment variables, which libraries read as they are imported. Each
kind has one spare at most. It forks the services, so that the imports are done once a run; one that cannot
fork (`services.spare.can_fork`) becomes the service, in the session that it was started in.
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

AFTER_S = 5.0
"""Seconds after which a spare that was used and has ended has a successor: it would slow down the service."""
AGAIN_S = 60.0
"""Seconds after which a spare that ended by itself, or for which there was no memory, is started again."""
TRIES = 3
"""Spares of a kind that may end by themselves, one after the other, before no more are started."""
READY_S = 300.0
"""Seconds that a spare has for its imports."""
LATE_S = 30.0
"""Seconds of its imports after which no service waits for a spare: a new process takes about as long."""
ORDER_S = 10.0
"""Limit of having a spare fork and handing over a name, seconds."""
ROOM_BYTES = 4 << 30
"""Memory that has to be free on the host before a spare is started."""

Kind = tuple[str, tuple[tuple[str, str], ...], frozenset[str]]
"""Module, variables, and names of variables that are withheld."""


@dataclass(slots=True)
class Spare:
    """A process that waits to become a service, or to fork one."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    forks: bool
    used: asyncio.Event
    """Set once there is a service of it: the life of one that does not fork is the service's from then on."""


class Spares:
    """The spares of a fleet."""

    def __init__(self, logs: Path) -> None:
        """Begin without spares; they write `spare.NAME.log` in `logs`, NAME being a service."""
        self._logs = logs
        self._kinds: dict[Kind, str] = {}
        """Kinds to keep a spare of -> the first service of that kind."""
        self._ready: dict[Kind, Spare] = {}
        self._imports: dict[Kind, asyncio.Event] = {}
        """Kind whose spare imports now -> set once it is ready, has failed, or is late."""
        self._tasks: asyncio.TaskGroup | None = None
        self._importing = asyncio.Lock()
        """Held by the one spare that imports: together they would leave the run no processor."""
        self._ordering = asyncio.Lock()
        """Held by the one service that is made of a spare: answers do not mix."""

    def add(
        self, name: str, module: str, environ: Mapping[str, str], withheld: frozenset[str] = frozenset()
    ) -> None:
        """Keep a spare for the service `name`, and for others of its kind."""
        kind = _kind(module, environ, withheld)
        if kind in self._kinds:
            return
        self._kinds[kind] = name
        if self._tasks is not None:
            self._tasks.create_task(self._keep_loop(kind), name=f"spare-{name}")

    async def run(self, wait_started: Callable[[], Awaitable[None]]) -> None:
        """Keep the spares until cancelled; then those that were not used are killed.

        Args:
            wait_started: returns once the run makes steps. The first spares are started then, as they would
                slow down its start.
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
        """Make the service `name` of the spare of a kind, and append its output to `log_path`.

        It waits for one that imports already, until `LATE_S`: a new process of the service would import the
        same at the same time. Returns None if there is none.
        """
        kind = _kind(module, environ, withheld)
        if importing := self._imports.get(kind):
            await importing.wait()
            if kind in self._imports:  # it may hang
                see = self._log(self._kinds[kind])
                log.warning("spare.late name=%s seconds=%g instead=a new process see=%s", name, LATE_S, see)
        async with self._ordering:
            spare = self._ready.get(kind)
            if spare is None:
                return None
            if not spare.forks:
                del self._ready[kind]
                spare.used.set()
            with contextlib.suppress(OSError, TimeoutError, ValueError), contextlib.ExitStack() as undo:
                undo.callback(kill_session, spare.process)  # then a fork without an order ends, too
                async with asyncio.timeout(ORDER_S):
                    process = await _forked(spare) if spare.forks else spare.process
                    spare.writer.write(json.dumps({"name": name, "log": str(log_path)}).encode() + b"\n")
                    await spare.writer.drain()
                undo.pop_all()
                spare.used.set()
                log.info("service.from_spare name=%s pid=%d", name, process.pid)
                return process
        return None

    async def _keep_loop(self, kind: Kind) -> None:
        name, tries = self._kinds[kind], 0
        while tries < TRIES:
            if not _has_room():
                log.warning("spare.no_memory name=%s needs_mb=%d", name, ROOM_BYTES >> 20)
            elif await self._keep_one(kind):
                tries = 0
                await asyncio.sleep(AFTER_S)
                continue
            else:
                tries += 1
                log.warning("spare.died name=%s tries=%d see=%s", name, tries, self._log(name))
            await asyncio.sleep(AGAIN_S)

    async def _keep_one(self, kind: Kind) -> bool:
        """Start a spare and wait until it is used; return False if it could not start, or ended before."""
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with self._importing, asyncio.timeout(READY_S):
                    with self._import_noted(kind):
                        spare = await self._start(kind)
                        stack.push_async_callback(self._end, kind, spare)
                        said = await spare.reader.readline()
                        if said not in (READY, FORKS):
                            return False
                        spare.forks = said == FORKS
                        self._ready[kind] = spare
                log.info("spare.ready name=%s pid=%d", self._kinds[kind], spare.process.pid)
                if spare.forks:
                    await spare.process.wait()
                else:  # it closes its end when it becomes the service, and as it dies
                    await spare.reader.read()
            except ConnectionError:  # it was killed before it has read its order
                pass
            except (OSError, TimeoutError) as error:
                log.warning("spare.not_ready name=%s error=%r", self._kinds[kind], error)
                return False
            return spare.used.is_set()

    @contextlib.contextmanager
    def _import_noted(self, kind: Kind) -> Iterator[None]:
        """Have `take` wait for the spare that imports within the block."""
        self._imports[kind] = event = asyncio.Event()
        late = asyncio.get_running_loop().call_later(LATE_S, event.set)
        try:
            yield
        finally:
            late.cancel()
            del self._imports[kind]
            event.set()

    async def _end(self, kind: Kind, spare: Spare) -> None:
        """Forget a spare, and kill it unless it has become a service."""
        self._ready.pop(kind, None)
        spare.writer.close()
        if spare.forks or not spare.used.is_set():
            kill_session(spare.process)
            await spare.process.wait()

    async def _start(self, kind: Kind) -> Spare:
        module, environ, withheld = kind
        name = self._kinds[kind]
        mine, its = socket.socketpair()
        with its, contextlib.ExitStack() as opened:
            opened.callback(mine.close)
            with self._log(name).open("wb") as output:
                process = await start_session(
                    ("services.spare", module), dict(environ), f"spare.{name}", output, its.fileno(), withheld
                )
            opened.callback(kill_session, process)
            reader, writer = await asyncio.open_unix_connection(sock=mine)
            opened.pop_all()
        return Spare(process, reader, writer, False, asyncio.Event())

    def _log(self, name: str) -> Path:
        return self._logs / f"spare.{name}.log"


async def _forked(spare: Spare) -> ForkedProcess:
    """Have a spare fork; the process waits for its order.

    Raises:
        ValueError: the spare has died.
    """
    with adopting_orphans():
        spare.writer.write(b"\n")
        await spare.writer.drain()
        return ForkedProcess(int(await spare.reader.readline()))


def _kind(module: str, environ: Mapping[str, str], withheld: frozenset[str]) -> Kind:
    return module, tuple(sorted(environ.items())), withheld


def _has_room() -> bool:
    try:
        return memory_available() >= ROOM_BYTES
    except OSError:  # not Linux: it cannot be known
        return True
