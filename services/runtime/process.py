"""Provides a service with its settings, ledger, registration, waits and health endpoint."""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from protocol.errors import TetherError
from protocol.ids import new_incarnation
from protocol.topics import Role, Topic
from services.bus.broadcast import Broadcaster, Listener
from services.bus.receiver import Receiver
from services.bus.sender import Sender
from services.ledger.interface import Peer
from services.ledger.redis.ledger import RedisLedger
from services.observability.http import HttpServer
from services.observability.metrics import Metrics
from services.observability.printable import without_numbers
from services.observability.start_parts import READY
from services.runtime.event_loop import is_set_within
from services.runtime.run_ledger import open_ledger
from services.runtime.start_time import seconds_since_start
from services.settings.sections import Settings

B = TypeVar("B", Receiver, Broadcaster)
C = TypeVar("C", Sender, Listener)
S = TypeVar("S", bound=Receiver | Broadcaster | Sender | Listener)
log = logging.getLogger("tether")


def pid_space() -> str:
    """Return the namespace in which this process's id is unique: kernel boot and pid namespace.

    Empty on systems other than Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


class Process:
    """An incarnation of a service: its settings, ledger, registration and stop event."""

    def __init__(self, role: Role, settings: Settings, ledger: RedisLedger, name: str) -> None:
        self.role = role
        self.settings = settings
        self.ledger = ledger
        self.incarnation = new_incarnation(name)
        """Unique name of this process in the registry: `name` and a random suffix."""
        self.stop = asyncio.Event()
        """Set on SIGTERM or SIGINT: the service drains and returns."""
        self.metrics = Metrics(role)
        self.info: dict[str, Any] = {
            "name": name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "pid_space": pid_space(),
            "started": time.time(),
        }
        """Registered facts about this process, JSON types; services add their own."""
        self._waits: dict[object, tuple[str, float]] = {}
        self._work: dict[str, list[float]] = {}
        self._registering = asyncio.Lock()
        self.on_heartbeat: list[Callable[[], None]] = []
        """Called before each registration, to update `info`."""
        self.edges: dict[str, Callable[[], Mapping[str, object]]] = {}
        """State of the service's bus sockets by topic, shown by `/health`: queues and unfinished messages."""

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.settings.run.name

    @property
    def waits(self) -> list[str]:
        """Current waits of the process."""
        return list(dict.fromkeys(what for what, _ in self._waits.values()))

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[Callable[[str], None]]:
        """Record that the process waits for `what`, for the registry, the metrics and `tether status`.

        Blocks may overlap: of several waits for the same thing, the longest is shown.

        Yields:
            A function that adds a reason during the wait: `set_detail("bound")`.
        """
        since, block = time.monotonic(), object()
        self._waits[block] = what, since

        def set_detail(reason: str) -> None:
            self._waits[block] = f"{what}: {reason}", since

        try:
            yield set_detail
        finally:
            del self._waits[block]

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Record that the process works on `what`, such as "step 3", in the registry. Blocks may overlap."""
        since = time.monotonic()
        self._work.setdefault(what, []).append(since)
        try:
            yield
        finally:
            self._work[what].remove(since)
            if not self._work[what]:
                del self._work[what]

    async def ready(self, part: str) -> None:
        """Log and register how many seconds this process took until `part` was ready."""
        seconds = round(seconds_since_start(), 1)
        self.info[READY] = {**self.info.get(READY, {}), part: seconds}
        log.info("ready part=%s seconds=%.1f", part, seconds)
        await self.register()  # at once, since the first step may precede the next heartbeat

    async def register(self) -> None:
        """Register this process with its current `info` and waits."""
        async with self._registering:  # an older registration must not overwrite a newer one
            await self._register()

    async def _register(self) -> None:
        for refresh in self.on_heartbeat:
            refresh()
        now = time.monotonic()
        newest_first = sorted(self._waits.values(), key=lambda wait: -wait[1])
        waits = {what: round(now - since, 1) for what, since in newest_first}
        self.metrics.waiting.clear()
        by_length = sorted(waits.items(), key=lambda wait: wait[1])
        for what, seconds in by_length:  # labels omit numbers: the longest wait per label is written last
            self.metrics.waiting.labels(without_numbers(what)).set(seconds)
        work = {what: (len(since), round(now - min(since), 1)) for what, since in self._work.items()}
        info = {**self.info, "waits": waits, "work": work}
        await self.ledger.register(
            Peer(self.role, self.incarnation, info), ttl_ms=int(self.settings.ledger.ttl_s * 1000)
        )

    async def heartbeat_loop(self) -> None:
        """Register the process three times per `ledger.ttl_s`, until cancelled."""
        while True:
            await self.register()
            await asyncio.sleep(self.settings.ledger.ttl_s / 3)

    def binding_socket(self, kind: type[B], topic: Topic) -> B:
        """Create the socket that this process binds for a topic; it has no endpoint yet."""
        return self._watch_socket(
            topic, kind(topic, run=self.run, incarnation=self.incarnation, config=self.settings.bus)
        )

    def connecting_socket(self, kind: type[C], topic: Topic) -> C:
        """Create the socket that connects to the registered endpoints of a topic."""
        socket = kind(
            topic,
            run=self.run,
            incarnation=self.incarnation,
            role=self.role,
            config=self.settings.bus,
            discover=lambda: self.ledger.endpoints(topic.name),
        )
        return self._watch_socket(topic, socket)

    def _watch_socket(self, topic: Topic, socket: S) -> S:
        """Show the counters of a socket in the metrics, and its queues in `/health`."""
        name = topic.name
        self.metrics.watch(f"tether_bus_{name}", f"Bus counters, edge {name}", socket.stats.as_dict)
        if isinstance(socket, Receiver | Sender):
            self.edges[name] = socket.snapshot
        return socket

    async def stopped_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for the stop event; return whether it is set."""
        return await is_set_within(self.stop, seconds)


Serve = Callable[[Process], Awaitable[None]]
"""Service function: runs until `process.stop` is set, then drains and returns."""


@contextlib.asynccontextmanager
async def open_process(role: Role, settings: Settings, name: str) -> AsyncIterator[Process]:
    """Open the ledger and the health endpoint and register; unregister at the end of the block.

    Raises:
        SettingsError: no ledger is configured, or the health endpoint cannot be bound.
        Unavailable: the ledger did not answer.
    """
    async with open_ledger(settings) as ledger:
        if role is not Role.INGEST:  # the ingest reconciles the ledger
            await ledger.guard()
        process = Process(role, settings, ledger, name)
        server = HttpServer(
            process.metrics.registry,
            lambda: {
                "ok": not process.stop.is_set(),
                "role": role,
                "incarnation": process.incarnation,
                "waits": process.waits,
                "edges": {topic: snapshot() for topic, snapshot in process.edges.items()},
            },
        )
        process.info["http"] = await server.start(settings.bus.host, settings.bus.health_port)
        try:
            await process.register()
            yield process
        finally:
            await server.close()
            with contextlib.suppress(TetherError, TimeoutError):
                async with asyncio.timeout(2):
                    await ledger.unregister(process.incarnation)
