"""Connects one end of an edge: one connection to each receiver in the registry.

A link is one TCP connection. A link never reconnects by itself, so its counters and frame order are valid for
its whole life. A link is lost when its receiver leaves the registry, falls silent, disconnects or proves to
be another process. `on_lost` is then called, and the next read of the registry opens a new link.
"""

import asyncio
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol.codec import encode
from protocol.errors import ProtocolError, TetherError
from protocol.messages import Heartbeat, Hello
from protocol.topics import Topic
from services.bus.config import BusConfig
from services.bus.curve import ClientKeys
from services.bus.pump import Pump, make_context
from services.bus.stats import BusStats

log = logging.getLogger(__name__)

T = TypeVar("T")
Discover = Callable[[], Awaitable[Mapping[str, str]]]
"""Reads the registry and returns receiver incarnation -> endpoint."""
DISCONNECT_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class Link(Generic[T]):
    """A connection to one receiver."""

    def __init__(
        self, owner: "Links[T]", context: zmq.Context[zmq.Socket[bytes]], incarnation: str, endpoint: str
    ) -> None:
        config = owner.config
        self.incarnation = incarnation
        self.endpoint = endpoint
        self.ready = False
        """Whether the receiver has answered the hello."""
        self.full = False
        """Whether the last send found the socket's queue full."""
        self.sent = 0
        """Number of messages sent on this connection."""
        self.credit = 0
        """Total number of messages that may be sent on this connection; -1: unlimited."""
        self.outstanding: dict[str, T] = {}
        """Unfinished messages sent on this link, by id, oldest first; maintained by the user of `Links`."""
        self.last_frame_s = asyncio.get_running_loop().time()
        """Arrival time of the last frame, by the loop's clock."""
        self.lost = ""
        """Why the connection is unusable; empty while it is usable."""
        self._sequence = -1
        self._owner = owner
        self._stats = owner.stats
        self._socket = context.socket(zmq.DEALER)
        try:
            for option, value in (
                (zmq.RECONNECT_IVL, -1),
                (zmq.MAXMSGSIZE, config.max_frame_bytes),
                (zmq.SNDHWM, config.high_water_mark),
                (zmq.RCVHWM, config.high_water_mark),
                (zmq.HEARTBEAT_IVL, max(1, int(config.heartbeat_s * 1000))),
                (zmq.HEARTBEAT_TIMEOUT, int(config.peer_timeout_s * 1000)),
                (zmq.IPV6, int("[" in endpoint)),
            ):
                self._socket.setsockopt(option, value)
            if owner.keys is not None:
                owner.keys.secure(self._socket)
            self._monitor = self._socket.get_monitor_socket(DISCONNECT_EVENTS)
            self._socket.connect(endpoint)
        except BaseException:
            self._socket.disable_monitor()
            self._socket.close(0)
            raise
        self.pump = Pump(self._socket, self._take, self._check_writable)

    def send(self, frame: bytes) -> bool:
        """Queue a frame on the socket; return False if the queue is full, until `on_writable` is called."""
        try:
            # frames above zmq.COPY_THRESHOLD are shared, not copied
            self._socket.send(frame, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self.full = True
            return False
        finally:
            self.pump.poke()
        self._stats.bytes_out += len(frame)
        return True

    def heartbeat(self, beat: Heartbeat) -> bool:
        """Record a heartbeat; return False if it is outdated or from another receiver (the link is lost)."""
        if beat.receiver != self.incarnation:
            self.lost = f"is now {beat.receiver}"
            return False
        if beat.sequence < self._sequence:
            return False
        self._sequence = beat.sequence
        self.ready = True
        return True

    def check(self, now_s: float, timeout_s: float) -> None:
        """Set `lost` if the connection broke, or if no unread bytes arrived for `timeout_s`."""
        while not self.lost and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self.lost = "unauthorized" if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH else "disconnected"
        if not self.lost and now_s - self.last_frame_s > timeout_s:
            self.pump.drain()
            if now_s - self.last_frame_s > timeout_s:
                self.lost = self.lost or "silent"

    def close(self) -> None:
        """Close the connection and drop unsent frames."""
        self.pump.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)

    def _take(self) -> None:
        frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        if frame.more:
            while frame.more:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            self._stats.malformed += 1
            return
        self._stats.bytes_in += len(frame)
        self.last_frame_s = asyncio.get_running_loop().time()
        try:
            self._owner.on_frame(self, frame)
        except ProtocolError as error:
            self._stats.malformed += 1
            log.debug("bus.malformed peer=%s error=%s", self.incarnation, error)

    def _check_writable(self) -> None:
        if self.full and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
            self.full = False
            self._owner.on_writable()


class Links(Generic[T]):
    """All links of one topic, as an `async with` block.

    `on_frame` is called with every frame and raises ProtocolError for a malformed frame. `on_lost` is called
    with each removed, closed link, `on_writable` when a full link has room again. An error of `discover`
    other than TetherError and OSError ends the block.
    """

    def __init__(
        self,
        topic: Topic,
        *,
        run: str,
        incarnation: str,
        role: str,
        config: BusConfig,
        stats: BusStats,
        discover: Discover,
        on_frame: Callable[[Link[T], zmq.Frame], None],
        on_lost: Callable[[Link[T]], None],
        on_writable: Callable[[], None],
    ) -> None:
        self.config = config
        self.stats = stats
        self.on_frame = on_frame
        self.on_writable = on_writable
        self._on_lost = on_lost
        self._topic = topic
        self._run = run
        self._hello = Hello(sender=incarnation, role=role)
        self._discover = discover
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self.keys: ClientKeys | None = None
        self._links: dict[str, Link[T]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._discover_error = ""
        # receivers that refuse this process's key: logged once each
        self._rejecting_receivers: set[str] = set()
        self._group = asyncio.TaskGroup()
        self._task: asyncio.Task[None] | None = None

    @property
    def links(self) -> Mapping[str, Link[T]]:
        """Links by the receiver's incarnation; the order breaks ties between receivers."""
        return self._links

    async def __aenter__(self) -> Self:
        """Read the keys and start to discover receivers.

        Raises:
            SettingsError: keys are required and cannot be read.
        """
        if self.config.curve_dir:
            self.keys = ClientKeys.load(self.config.curve_dir)
        self._context = make_context()
        await self._group.__aenter__()
        self._task = self._group.create_task(self._discover_loop(), name=f"bus.{self._topic.name}.discover")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all links without calling `on_lost`."""
        # other errors are not passed to the group, which would wrap them
        cancelled = error if isinstance(error, asyncio.CancelledError) else None
        try:
            if self._task is not None:
                self._task.cancel()
            await self._group.__aexit__(
                type(cancelled) if cancelled else None, cancelled, trace if cancelled else None
            )
        finally:
            self._close()

    async def _discover_loop(self) -> None:
        """Update the links from the registry, until cancelled.

        While the registry cannot be read, the links do not change.
        """
        self._timer = asyncio.get_running_loop().call_later(self.config.heartbeat_s, self._check_links)
        while True:
            try:
                async with asyncio.timeout(self.config.peer_timeout_s):
                    endpoints = await self._discover()
            except (TetherError, OSError) as error:
                if self._discover_error != str(error):
                    log.warning("bus.discover_failed topic=%s error=%r", self._topic.name, error)
                self._discover_error = str(error)
            else:
                self._discover_error = ""
                self._reconcile(endpoints)
            await asyncio.sleep(self.config.heartbeat_s)

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._context is not None:
            self._context.destroy(0)
            self._context = None

    def _reconcile(self, endpoints: Mapping[str, str]) -> None:
        self._rejecting_receivers.intersection_update(endpoints)
        for incarnation, link in list(self._links.items()):
            if endpoints.get(incarnation) != link.endpoint:
                link.lost = link.lost or "vanished"
                self._remove(link)
        for incarnation, endpoint in endpoints.items():
            if incarnation in self._links or self._context is None:
                continue
            try:
                link = Link(self, self._context, incarnation, endpoint)
            except zmq.ZMQError as error:
                log.warning(
                    "bus.bad_endpoint topic=%s receiver=%s endpoint=%s error=%s",
                    self._topic.name,
                    incarnation,
                    endpoint,
                    error,
                )
                continue
            self._links[incarnation] = link
            self._links = dict(sorted(self._links.items(), key=self._rank))
            self._send_hello(link)

    def _rank(self, item: tuple[str, Link[T]]) -> int:
        """Return a sort key that differs between senders, so that they prefer different receivers."""
        return zlib.crc32(f"{self._hello.sender} {item[0]}".encode())

    def _send_hello(self, link: Link[T]) -> None:
        """Send a hello; repeated while messages are outstanding, so that receivers detect lost messages."""
        link.send(encode(msgspec.structs.replace(self._hello, sent=link.sent), run=self._run, id=""))

    def _check_links(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.config.heartbeat_s, self._check_links)
        for link in list(self._links.values()):
            link.check(loop.time(), self.config.peer_timeout_s)
            if link.lost:
                self._remove(link)
            elif not link.ready or link.outstanding:
                self._send_hello(link)

    def _remove(self, link: Link[T]) -> None:
        if link.ready or (link.lost == "unauthorized" and link.incarnation not in self._rejecting_receivers):
            log.warning(
                "bus.link_lost topic=%s receiver=%s reason=%s", self._topic.name, link.incarnation, link.lost
            )
        if link.lost == "unauthorized":
            self._rejecting_receivers.add(link.incarnation)
        del self._links[link.incarnation]
        link.close()
        self._on_lost(link)


class LinkedSocket(ABC):
    """A connecting end of an edge; on exit of its `async with` block, first its links close, then itself."""

    _links: Links[Any]

    async def __aenter__(self) -> Self:
        await self._links.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._links.__aexit__(kind, error, trace)
        finally:
            self._close()

    @abstractmethod
    def _close(self) -> None:
        """Make waiting calls fail."""
