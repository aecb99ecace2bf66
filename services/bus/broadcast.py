"""Implements both ends of a BROADCAST edge: the trainer's messages to all engines, and their answers.

Messages are neither acknowledged nor resent; a peer reads missed state from the ledger. Every queue is
bounded. `high_water_mark` bounds the frames queued per peer; a peer with a full queue misses the message,
which is counted. `high_water_mark` also bounds the received messages and answers, and `MAX_UNSENT` the
answers that wait for a connection; these queues drop and count their oldest item.
"""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import zmq

from protocol.codec import Envelope, decode, encode
from protocol.errors import ProtocolError
from protocol.ids import new_token
from protocol.messages import AnyMessage, Heartbeat, Hello, Message, WeightManifest
from protocol.topics import Pattern, Topic
from services.bus.config import BusConfig
from services.bus.inbox import Inbox
from services.bus.links import Discover, Link, LinkedSocket, Links
from services.bus.peers import MAX_PEERS
from services.bus.router import Router, SendResult
from services.bus.stats import BusStats

log = logging.getLogger(__name__)

STICKY: tuple[type[Message], ...] = (WeightManifest,)
"""Types whose newest message is also sent to peers that connect later."""
MAX_UNSENT = 64
"""Maximum number of a listener's answers that wait for a connection."""

Answer = tuple[Envelope, AnyMessage]
"""A received message with its envelope."""


@dataclass(slots=True)
class _Subscriber:
    incarnation: str
    missed: set[type[Message]] = field(default_factory=set)
    """Sticky types whose newest message did not fit the peer's queue; resent at each heartbeat."""


class Broadcaster:
    """Binding end of a BROADCAST edge: publishes to all peers that sent a hello.

    Use as `async with Broadcaster(...) as caster`, or call `start` and `close`.
    """

    def __init__(self, topic: Topic, *, run: str, incarnation: str, config: BusConfig) -> None:
        if topic.pattern is not Pattern.BROADCAST:
            raise TypeError(f"topic {topic.name} is not a {Pattern.BROADCAST} topic")
        self.stats = BusStats()
        self.endpoint = ""
        """Endpoint to register; empty before `start`."""
        self._topic = topic
        self._run = run
        self._incarnation = incarnation
        self._config = config
        self._router = Router(topic, config=config, stats=self.stats, on_frame=self._on_frame)
        self._answers: Inbox[Answer] = Inbox(f"broadcaster of {topic.name}", config.high_water_mark)
        self._peers: dict[bytes, _Subscriber] = {}
        self._newest: dict[type[Message], bytes] = {}
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> str:
        """Bind the socket; return the endpoint to register.

        Raises:
            SettingsError: the port is in use, or the address requires keys that do not exist.
        """
        self.endpoint = self._router.open()
        self._timer = asyncio.get_running_loop().call_later(self._config.heartbeat_s, self._on_timer)
        return self.endpoint

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def publish(self, message: AnyMessage, epoch: str = "") -> int:
        """Send a message to every connected peer; return the number of peers reached.

        Never waits: a peer with a full queue misses the message and is counted. A message over
        `bus.max_frame_bytes` is sent to no peer, because peers would disconnect.
        """
        if not isinstance(message, self._topic.carries):
            raise TypeError(f"topic {self._topic.name} does not carry {type(message).__name__}")
        frame = encode(message, run=self._run, id=new_token(), epoch=epoch)
        kind = type(message)
        if len(frame) > self._config.max_frame_bytes:
            self._skip_oversized(kind, len(frame))
            return 0
        if kind in STICKY:
            self._newest[kind] = frame
        reached = 0
        for connection, peer in list(self._peers.items()):
            peer.missed.discard(kind)
            reached += self._send(connection, peer, kind, frame)
        return reached

    async def answers(self) -> Answer:
        """Wait for the next answer of a peer and return it. Cancelling loses no answer.

        Raises:
            Unavailable: the broadcaster is closed.
        """
        return await self._answers.get()

    @property
    def peers(self) -> tuple[str, ...]:
        """Incarnations of the connected peers."""
        return tuple(peer.incarnation for peer in self._peers.values())

    async def close(self) -> None:
        """Close the sockets and drop unsent messages. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._router.close()
        self._answers.close()

    def _skip_oversized(self, kind: type[Message], nbytes: int) -> None:
        """Count and log a message that is too large; peers must not get an older message of its kind."""
        self.stats.dropped_full += 1
        max_bytes = self._config.max_frame_bytes
        log.error(
            "bus.too_large topic=%s message=%s bytes=%d (over bus.max_frame_bytes %d, which can be raised)",
            self._topic.name,
            kind.__name__,
            nbytes,
            max_bytes,
        )
        self._newest.pop(kind, None)
        for peer in self._peers.values():
            peer.missed.discard(kind)

    def _send(self, connection: bytes, peer: _Subscriber, kind: type[Message], frame: bytes) -> bool:
        outcome = self._router.send(connection, frame)
        if outcome is SendResult.SENT:
            self.stats.sent += 1
        elif outcome is SendResult.UNREACHABLE:
            self._peers.pop(connection, None)
        else:
            self.stats.dropped_full += 1
            log.warning(
                "bus.peer_full topic=%s peer=%s message=%s", self._topic.name, peer.incarnation, kind.__name__
            )
            if kind in STICKY:
                peer.missed.add(kind)
        return outcome is SendResult.SENT

    def _on_frame(self, connection: bytes, frame: zmq.Frame) -> None:
        envelope, message = decode(frame.buffer)
        if envelope.run != self._run or not isinstance(message, (Hello, *self._topic.answers)):
            raise ProtocolError(f"{type(message).__name__} of run {envelope.run!r}")
        if isinstance(message, Hello):
            self._on_hello(connection, message)
        elif connection not in self._peers:
            self.stats.unknown_peer += 1
        else:
            self.stats.received += 1
            _put(self._answers, (envelope, message), self.stats)

    def _on_hello(self, connection: bytes, hello: Hello) -> None:
        if connection not in self._peers:
            if len(self._peers) >= MAX_PEERS:
                self.stats.dropped_full += 1
                return
            self._peers[connection] = _Subscriber(hello.sender, set(self._newest))
        self._send_heartbeat(connection)

    def _on_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._config.heartbeat_s, self._on_timer)
        self._sequence += 1
        for connection in list(self._peers):
            self._send_heartbeat(connection)

    def _send_heartbeat(self, connection: bytes) -> None:
        beat = encode(Heartbeat(receiver=self._incarnation, sequence=self._sequence), run=self._run, id="")
        outcome = self._router.send(connection, beat)
        if outcome is SendResult.UNREACHABLE:
            del self._peers[connection]
        elif outcome is SendResult.SENT:
            peer = self._peers[connection]
            missed, peer.missed = peer.missed, set()
            for kind in missed:
                self._send(connection, peer, kind, self._newest[kind])


class Listener(LinkedSocket):
    """Connecting end of a BROADCAST edge, linked to every broadcaster; use with `async with`.

    The newest sticky message is received again after a reconnect, so readers must compare its content.
    """

    def __init__(
        self, topic: Topic, *, run: str, incarnation: str, role: str, config: BusConfig, discover: Discover
    ) -> None:
        if topic.pattern is not Pattern.BROADCAST:
            raise TypeError(f"topic {topic.name} is not a {Pattern.BROADCAST} topic")
        self.stats = BusStats()
        self._topic = topic
        self._run = run
        self._inbox: Inbox[Answer] = Inbox(f"listener of {topic.name}", config.high_water_mark)
        self._unsent: deque[bytes] = deque()
        self._links: Links[None] = Links(
            topic,
            run=run,
            incarnation=incarnation,
            role=role,
            config=config,
            stats=self.stats,
            discover=discover,
            on_frame=self._on_frame,
            on_lost=lambda link: None,
            on_writable=self._flush,
        )

    def _close(self) -> None:
        self._inbox.close()

    async def receive(self) -> Answer:
        """Wait for the next message and return it. Cancelling loses no message.

        Raises:
            Unavailable: the listener is closed.
        """
        return await self._inbox.get()

    def answer(self, message: AnyMessage, epoch: str = "") -> None:
        """Send an answer to every connected broadcaster, or to the next broadcaster that connects.

        Never waits; the answer may be lost.
        """
        if not isinstance(message, self._topic.answers):
            raise TypeError(f"topic {self._topic.name} has no answer {type(message).__name__}")
        if len(self._unsent) >= MAX_UNSENT:
            self._unsent.popleft()
            self.stats.dropped_full += 1
        self._unsent.append(encode(message, run=self._run, id=new_token(), epoch=epoch))
        self._flush()

    def _flush(self) -> None:
        links = [link for link in self._links.links.values() if link.ready and not link.lost]
        while self._unsent and links and not all(link.full for link in links):
            frame = self._unsent.popleft()
            for link in links:
                if link.send(frame):
                    self.stats.sent += 1
                else:
                    self.stats.dropped_full += 1

    def _on_frame(self, link: Link[None], frame: zmq.Frame) -> None:
        envelope, message = decode(frame.buffer)
        if envelope.run != self._run or not isinstance(message, (Heartbeat, *self._topic.carries)):
            raise ProtocolError(f"{type(message).__name__} of run {envelope.run!r}")
        if isinstance(message, Heartbeat):
            if link.heartbeat(message):
                self._flush()
            return
        self.stats.received += 1
        _put(self._inbox, (envelope, message), self.stats)


def _put(inbox: Inbox[Answer], item: Answer, stats: BusStats) -> None:
    if inbox.full:
        inbox.drop_oldest()
        stats.dropped_full += 1
    inbox.put(item)
