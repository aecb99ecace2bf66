"""The receiving end of a DELIVER edge.

A message is *held* from its arrival until `ack` or `refuse`; its id is then remembered, so that a repeat is
answered at once. What is bounded: messages waiting for `receive` (`high_water_mark`; when it is reached the
socket is not read and the senders wait), messages held (the senders' `max_outstanding`, or the topic's
window), ids remembered (`REMEMBERED`), peers and what they are owed.
"""

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import zmq

from protocol.codec import Envelope, decode_envelope, open_payload
from protocol.errors import ProtocolError
from protocol.messages import AnyMessage, Hello
from protocol.topics import Pattern, Topic
from services.bus.config import BusConfig
from services.bus.inbox import Inbox
from services.bus.peers import Peer, SenderSessions
from services.bus.router import Router
from services.bus.stats import BusStats

log = logging.getLogger(__name__)

REMEMBERED = 16_384
"""Ids of finished messages that are remembered (8 MB); the oldest are forgotten first. A repeat of one that
was forgotten is only work: what counts is the ledger's transition."""
MAX_ID_CHARACTERS = 128


@dataclass(slots=True)
class Delivery:
    """A message that waits for `Receiver.ack` or `Receiver.refuse`."""

    envelope: Envelope
    message: AnyMessage
    peer: bytes
    """Connection that it came from."""


class Receiver:
    """Binds, receives, acknowledges, and tells its senders by heartbeat what it holds.

    Use it as `async with Receiver(...) as receiver`, or call `start` and `close`. It owns callbacks of the
    loop, and no task.
    """

    def __init__(self, topic: Topic, *, run: str, incarnation: str, config: BusConfig) -> None:
        if topic.pattern is not Pattern.DELIVER:
            raise TypeError(f"topic {topic.name} is not a {Pattern.DELIVER} topic")
        self.stats = BusStats()
        self.endpoint = ""
        self._topic = topic
        self._run = run
        self._router = Router(topic, config=config, stats=self.stats, on_frame=self._on_frame)
        self._inbox: Inbox[Delivery] = Inbox(f"receiver of {topic.name}", config.high_water_mark)
        self._held: dict[str, bytes] = {}  # message id -> connection that is told of its end
        self._finished: OrderedDict[str, str | None] = (
            OrderedDict()
        )  # message id -> why it was refused, None if acknowledged
        self._peers = SenderSessions(
            topic,
            run=run,
            incarnation=incarnation,
            config=config,
            router=self._router,
            stats=self.stats,
            held=lambda: len(self._held),
        )
        self._closed = False

    async def start(self) -> str:
        """Bind; returns the endpoint to register.

        Raises:
            SettingsError: if the port is taken, or the address needs keys that are not there.
        """
        self.endpoint = self._router.open()
        self._peers.start()
        return self.endpoint

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def receive(self) -> Delivery:
        """The next message; each id at most once while it is held or remembered. Cancelled, it leaves every
        message in place.

        Raises:
            Unavailable: if the receiver was closed.
        """
        delivery = await self._inbox.get()
        if self._router.pump is not None:
            self._router.pump.resume()
        return delivery

    def ack(self, delivery: Delivery) -> None:
        """Say that a message took effect. The sender is told in the next loop iteration; a second call does
        nothing."""
        self._finish(delivery.envelope.id, None)

    def refuse(self, delivery: Delivery, why: str) -> None:
        """Say that a message is refused for good: it is not sent again, and `Sender.send` raises
        `Declined(why)`."""
        self._finish(delivery.envelope.id, why)

    async def close(self) -> None:
        """Tell what is owed, as far as the sockets take it at once, and close. Messages still held are sent
        elsewhere."""
        if self._closed:
            return
        self._closed = True
        self._peers.stop()
        await asyncio.sleep(0)
        self._router.close()
        self._inbox.close()

    @property
    def waiting(self) -> int:
        """Messages that `receive` would return without waiting."""
        return len(self._inbox)

    def snapshot(self) -> dict[str, object]:
        """Who waits for whom: messages waiting for `receive`, messages held, and the senders."""
        return {
            "topic": self._topic.name,
            "waiting": len(self._inbox),
            "held": len(self._held),
            "peers": self._peers.snapshot(),
        }

    def _on_frame(self, connection: bytes, frame: zmq.Frame) -> None:
        peer = self._peers.get(connection)
        try:
            envelope = decode_envelope(frame.buffer)
            if envelope.run != self._run:
                raise ProtocolError(f"run {envelope.run!r} is not {self._run!r}")
            if peer is not None and 0 < len(envelope.id) <= MAX_ID_CHARACTERS:
                self._on_message(connection, peer, envelope)
                return
            hello = open_payload(envelope)
            if isinstance(hello, Hello):
                self._peers.on_hello(connection, hello)
                return
            if peer is None:
                self.stats.unknown_peer += 1
                return
            raise ProtocolError(f"{type(hello).__name__} without an id")
        except ProtocolError as error:
            self.stats.malformed += 1
            if peer is not None:
                peer.account.seen += (
                    1  # so that the next heartbeat makes the sender send again what this frame was to be
                )
            log.debug(
                "bus.malformed topic=%s peer=%s error=%s",
                self._topic.name,
                peer.incarnation if peer else "?",
                error,
            )

    def _on_message(self, connection: bytes, peer: Peer, envelope: Envelope) -> None:
        id, account = envelope.id, peer.account
        account.seen += 1
        if id in self._finished:
            self.stats.duplicates += 1
            self._peers.queue_ack(connection, id, self._finished[id])
            return
        if id in self._held:
            self.stats.duplicates += 1
            self._move(id, connection, peer)
            return
        if self._topic.window and account.seen > account.granted:
            self.stats.dropped_full += 1
            return
        try:
            message = open_payload(envelope)
            if not isinstance(message, self._topic.carries):
                raise ProtocolError(f"topic {self._topic.name} does not carry {type(message).__name__}")
        except ProtocolError as error:  # the checksum holds, so sending it again would not help
            self.stats.malformed += 1
            self._held[id] = connection
            self._finish(id, str(error))
            return
        self.stats.received += 1
        self._held[id] = connection
        peer.held[id] = None
        account.unfinished += 1
        self._inbox.put(Delivery(envelope, message, connection))
        if self._inbox.full and self._router.pump is not None:
            self._router.pump.pause()
        if self._topic.window:
            self._peers.flush_soon()

    def _move(self, id: str, connection: bytes, peer: Peer) -> None:
        """A held message came again, over another connection maybe: that one is told of its end."""
        self._release(id, self._held[id])
        self._held[id] = connection
        peer.held[id] = None
        peer.account.unfinished += 1

    def _finish(self, id: str, why: str | None) -> None:
        connection = self._held.pop(id, None)
        if connection is None:
            return
        self._finished[id] = why
        if len(self._finished) > REMEMBERED:
            self._finished.popitem(last=False)
        if why is None:
            self.stats.acked += 1
        else:
            self.stats.refused += 1
            log.info("bus.refused topic=%s message=%s why=%s", self._topic.name, id, why)
        self._release(id, connection)
        self._peers.queue_ack(connection, id, why)

    def _release(self, id: str, connection: bytes) -> None:
        peer = self._peers.get(connection)
        if peer is not None and id in peer.held:
            del peer.held[id]
            peer.account.unfinished -= 1
