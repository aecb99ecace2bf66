"""What every service process does around its own loop: settings, signals, ledger, registry, health, and the
way it ends.

A service is `async def serve(process: Process) -> None`. It runs until `process.stop` is set, then drains and
returns. SIGTERM and SIGINT set `stop`; a second one cancels. The first loop to end ends the process. Exit
codes: 0 drained, 1 failed, 2 wrong settings.
"""

import asyncio
import contextlib
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import uvloop

from protocol.errors import SettingsError, TetherError, Unavailable
from protocol.ids import new_incarnation
from protocol.topics import Role
from services.ledger.embedded_server import read_endpoint
from services.ledger.interface import Peer
from services.ledger.redis.ledger import RedisLedger
from services.ledger.redis.url import complete_url
from services.observability.http import HttpServer
from services.observability.metrics import Metrics
from services.settings.load import load_settings
from services.settings.sections import Settings

log = logging.getLogger("tether")

NUMBER = re.compile(r"\d+")
"""Numbers are left out of metric labels, so that there are not more of them with every group."""
EXIT_FAILED, EXIT_SETTINGS = 1, 2
DESCRIPTORS = 65_536
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Process:
    """One life of a service: its settings, its ledger, its name in the registry, and the event that stops
    it."""

    def __init__(self, role: Role, settings: Settings, ledger: RedisLedger, name: str) -> None:
        self.role = role
        self.settings = settings
        self.ledger = ledger
        self.incarnation = new_incarnation(name)
        self.stop = asyncio.Event()
        self.metrics = Metrics(role)
        self.info: dict[str, Any] = {
            "name": name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.time(),
        }
        self._waits: dict[str, float] = {}
        self._registering = asyncio.Lock()
        self.on_heartbeat: list[Callable[[], None]] = []
        """Called before each registration, to bring `info` up to date."""
        self.edges: dict[str, Callable[[], Mapping[str, object]]] = {}
        """State of the service's bus sockets by topic, shown by `/health`: who waits for whom."""

    @property
    def run(self) -> str:
        return self.settings.run.name

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[str], None]]:
        """Note that the process waits for `what`; shown in the registry, the metrics and `tether status`.

        Yields a function that says why, while the wait goes on: `set_detail("bound")`.
        """
        since, shown = time.monotonic(), what
        self._waits[shown] = since

        def set_detail(why: str) -> None:
            nonlocal shown
            self._waits.pop(shown, None)
            shown = f"{what}: {why}"
            self._waits[shown] = since

        try:
            yield set_detail
        finally:
            self._waits.pop(shown, None)

    async def register(self) -> None:
        """Tell the registry that this process lives, and what it waits for. What `info` held when this was
        called is there then."""
        async with self._registering:  # else an older word could overtake a newer one
            await self._register()

    async def _register(self) -> None:
        for refresh in self.on_heartbeat:
            refresh()
        now = time.monotonic()
        waits = {what: round(now - since, 1) for what, since in self._waits.items()}
        self.metrics.waiting.clear()
        for what, seconds in sorted(
            waits.items(), key=lambda wait: wait[1]
        ):  # of waits that differ in a number only, the longest
            self.metrics.waiting.labels(NUMBER.sub("N", what)).set(seconds)
        info = {**self.info, "waits": waits}
        await self.ledger.register(
            Peer(self.role, self.incarnation, info), ttl_ms=int(self.settings.ledger.ttl_s * 1000)
        )

    async def heartbeat_loop(self) -> None:
        """Register again and again until cancelled."""
        while True:
            await self.register()
            await asyncio.sleep(self.settings.ledger.ttl_s / 3)

    async def discover(self, topic: str) -> Mapping[str, str]:
        """Endpoints that serve `topic`: incarnation -> endpoint."""
        return await self.ledger.endpoints(topic)

    async def stopped_within(self, seconds: float) -> bool:
        """Wait until the process is to stop, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self.stop.wait()
        except TimeoutError:
            return False
        return True


Serve = Callable[[Process], Awaitable[None]]


def ledger_url(settings: Settings) -> str:
    """URL of the run's ledger: the configured one, or that of the embedded server in the run directory.

    Raises:
        SettingsError: if there is neither; says what to do.
    """
    config = settings.ledger
    if config.url:
        return complete_url(config.url, config.password_file, config.ca_file)
    url = read_endpoint(settings.run_dir / "ledger")
    if url is None:
        raise SettingsError(
            "no ledger: set TETHER_REDIS_URL (redis://HOST:6379/0), or start the run with `tether up`, "
            f"which keeps one in {settings.run_dir / 'ledger'}"
        )
    return url


@contextlib.asynccontextmanager
async def open_ledger(settings: Settings) -> AsyncIterator[RedisLedger]:
    """The run's ledger, closed at the end."""
    config = settings.ledger
    ledger = await RedisLedger.connect(
        ledger_url(settings),
        settings.run.name,
        timeout_s=config.timeout_s,
        retry_s=config.retry_s,
        archive_limit=config.archive_limit,
    )
    try:
        yield ledger
    finally:
        await ledger.close()


@contextlib.asynccontextmanager
async def open_process(role: Role, settings: Settings, name: str) -> AsyncIterator[Process]:
    """A process with ledger, health endpoint and registration; unregistered at the end."""
    async with open_ledger(settings) as ledger:
        if role not in (Role.INGEST, Role.MONITOR):  # the ingest is who looks; the monitor only reads
            await ledger.guard()
        process = Process(role, settings, ledger, name)
        server = HttpServer(
            process.metrics.registry,
            lambda: {
                "ok": not process.stop.is_set(),
                "role": role,
                "incarnation": process.incarnation,
                "waits": list(process._waits),
                "edges": {topic: snapshot() for topic, snapshot in process.edges.items()},
            },
        )
        process.info["http"] = await server.start(settings.bus.host, 0)
        try:
            await process.register()
            yield process
        finally:
            await server.close()
            with contextlib.suppress(TetherError):
                async with asyncio.timeout(2):
                    await ledger.unregister(process.incarnation)


class _Ended(Exception):
    """The service's own loop has returned: everything else is to be cancelled."""


async def run_process(role: Role, settings: Settings, name: str, serve: Serve) -> None:
    """Run a service until it is told to stop or fails. When it has ended well, signals to stop mean nothing
    to this process any more."""
    loop = asyncio.get_running_loop()
    async with open_process(role, settings, name) as process:
        main = asyncio.current_task()
        assert main is not None

        def on_signal() -> None:
            if process.stop.is_set():
                main.cancel()
            process.stop.set()

        for signum in STOP_SIGNALS:
            loop.add_signal_handler(signum, on_signal)

        async def body() -> None:
            await serve(process)
            raise _Ended

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(process.heartbeat_loop(), name="heartbeat")
                tasks.create_task(body(), name=role)
        except* _Ended:
            pass
    for signum in STOP_SIGNALS:
        loop.remove_signal_handler(signum)
        signal.signal(
            signum, signal.SIG_IGN
        )  # else one would kill it on its last way, which takes a moment where torch was loaded


def configure_logging(name: str) -> None:
    """Log lines to standard error: time, process, level, `event key=value`."""
    level = os.environ.get("TETHER_LOG_LEVEL", "INFO").upper()
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format=f"%(asctime)s {name} %(levelname).1s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    logging.captureWarnings(True)


def innermost(error: BaseException) -> BaseException:
    """The first error of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe_error(error: BaseException) -> tuple[str, int]:
    """One line and an exit code for an error that ends a process."""
    error = innermost(error)
    if isinstance(error, (SettingsError, Unavailable)):
        return str(error), EXIT_SETTINGS
    return f"{type(error).__name__}: {error}", EXIT_FAILED


def raise_fd_limit() -> None:
    """Allow this process as many open descriptors as the machine does, up to `DESCRIPTORS`: each connection
    is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def service_main(role: Role, serve: Serve) -> None:
    """The `main` of `python -m services.ROLE`."""
    name = os.environ.get("TETHER_INSTANCE", role)
    configure_logging(name)
    raise_fd_limit()
    try:
        settings = load_settings()
        uvloop.run(run_process(role, settings, name, serve))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(EXIT_FAILED)
    except (Exception, BaseExceptionGroup) as error:
        line, code = describe_error(error)
        if isinstance(innermost(error), Unavailable):
            code = EXIT_FAILED  # the ledger may only be away for a while: a restart may find it again
        if not isinstance(innermost(error), TetherError):
            log.exception("process.failed")
        log.error("process.failed %s", json.dumps(line))
        print(f"tether {role}: {line}", file=sys.stderr)
        sys.exit(code)
