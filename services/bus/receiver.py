"""Receives one end of a DELIVER edge: each message once, acknowledged or refused by its reader.

A message is *held* from its arrival until `ack` or `refuse`; its id is then remembered, so that a repeat is
answered at once. Everything is bounded: messages waiting for `receive` by `high_water_mark` (when it is
reached the socket is not read, and the senders wait), messages held by the senders' `max_outstanding` or the
topic's window, ids by `REMEMBERED_IDS`, senders and the acknowledgements queued for them by `peers.py`.
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
from services.bus.peers import SenderSession, SenderSessions
from services.bus.router import Router
from services.bus.stats import BusStats

log = logging.getLogger(__name__)

REMEMBERED_IDS = 16_384
"""Ids of finished messages that a receiver remembers (8 MB); the oldest are forgotten first.

A repeat of a message whose id was forgotten is worked on again, without effect: what counts is the ledger's
transition.
"""
MAX_ID_CHARACTERS = 128
"""Longest message id; a longer one is malformed."""


@dataclass(slots=True)
class Delivery:
    """Message that is held until `Receiver.ack` or `Receiver.refuse`."""

    envelope: Envelope
    message: AnyMessage
    peer: bytes
    """Connection that it arrived on."""


class Receiver:
    """Binding end of a DELIVER edge: receives, acknowledges, and sends heartbeats with what it holds.

    Use it as `async with Receiver(...) as receiver`, or call `start` and `close`. It owns callbacks of the
    loop, but no task.
    """

    def __init__(self, topic: Topic, *, run: str, incarnation: str, config: BusConfig) -> None:
        if topic.pattern is not Pattern.DELIVER:
            raise TypeError(f"topic {topic.name} is not a {Pattern.DELIVER} topic")
        self.stats = BusStats()
        self.endpoint = ""
        """Endpoint to register, once started."""
        self._topic = topic
        self._run = run
        self._router = Router(topic, config=config, stats=self.stats, on_frame=self._on_frame)
        self._inbox: Inbox[Delivery] = Inbox(f"receiver of {topic.name}", config.high_water_mark)
        self._held: dict[str, bytes] = {}  # message id -> connection to acknowledge on
        # message id -> why it was refused, None if acknowledged
        self._finished: OrderedDict[str, str | None] = OrderedDict()
        self._sessions = SenderSessions(
            topic,
            run=run,
            incarnation=incarnation,
            config=config,
            router=self._router,
            stats=self.stats,
            unfinished=lambda: len(self._held),
        )
        self._closed = False

    async def start(self) -> str:
        """Bind; return the endpoint to register.

        Raises:
            SettingsError: if the port is taken, or the address requires keys that do not exist.
        """
        self.endpoint = self._router.open()
        self._sessions.start()
        return self.endpoint

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def receive(self) -> Delivery:
        """Wait for the next message and return it; each id at most once while it is held or remembered.

        Cancelled, it leaves every message in place.

        Raises:
            Unavailable: if the receiver was closed.
        """
        delivery = await self._inbox.get()
        self._router.pump.resume()
        return delivery

    async def receive_waiting(self, most: int) -> list[Delivery]:
        """Wait for the next message; return it and those that wait behind it, `most` in all."""
        batch = [await self.receive()]
        while self._inbox and len(batch) < most:
            batch.append(await self.receive())
        return batch

    def ack(self, delivery: Delivery) -> None:
        """Acknowledge a message that took effect, in the next iteration of the loop. Idempotent."""
        self._finish(delivery.envelope.id, None)

    def answer(self, delivery: Delivery, answer: bytes) -> None:
        """Acknowledge a message with what its `Sender.send` returns, an encoded message.

        The id is not remembered: a repeat is worked on and answered again. An answer over half of
        `bus.max_frame_bytes` refuses the message instead: no repeat could be answered.
        """
        if len(answer) > self._sessions.largest_answer:
            self.refuse(delivery, f"its answer of {len(answer)} bytes is over half of bus.max_frame_bytes")
            return
        id = delivery.envelope.id
        connection = self._held.pop(id, None)
        if connection is not None:
            self.stats.acked += 1
            self._release(id, connection)
            self._sessions.queue_answer(connection, id, answer)

    def refuse(self, delivery: Delivery, why: str) -> None:
        """Refuse a message for good: it is not sent again, and `Sender.send` raises `Declined(why)`."""
        self._finish(delivery.envelope.id, why)

    async def close(self) -> None:
        """Send queued acknowledgements as far as the socket takes them at once, and close.

        Messages that are still held are sent to another receiver.
        """
        if self._closed:
            return
        self._closed = True
        self._sessions.stop()
        await asyncio.sleep(0)
        self._router.close()
        self._inbox.close()

    def snapshot(self) -> dict[str, object]:
        """Return who waits for whom: messages waiting for `receive`, messages held, and the senders."""
        return {
            "topic": self._topic.name,
            "waiting": len(self._inbox),
            "held": len(self._held),
            "senders": self._sessions.snapshot(),
        }

    def _on_frame(self, connection: bytes, frame: zmq.Frame) -> None:
        session = self._sessions.get(connection)
        try:
            envelope = decode_envelope(frame.buffer)
            if envelope.run != self._run:
                raise ProtocolError(f"run {envelope.run!r} is not {self._run!r}")
            if session is not None and 0 < len(envelope.id) <= MAX_ID_CHARACTERS:
                self._on_message(connection, session, envelope)
                return
            hello = open_payload(envelope)
            if isinstance(hello, Hello):
                self._sessions.on_hello(connection, hello)
                return
            if session is None:
                self.stats.unknown_peer += 1
                return
            raise ProtocolError(f"{type(hello).__name__} without an id")
        except ProtocolError:
            if session is not None:
                # so that the next heartbeat makes the sender repeat the message that this frame was
                session.account.seen += 1
            raise

    def _on_message(self, connection: bytes, session: SenderSession, envelope: Envelope) -> None:
        id, account = envelope.id, session.account
        account.seen += 1
        if id in self._finished:
            self.stats.duplicates += 1
            self._sessions.queue_ack(connection, id, self._finished[id])
            return
        if id in self._held:
            self.stats.duplicates += 1
            self._rehold(id, connection, session)
            return
        if self._topic.window and account.seen > account.granted:
            self.stats.dropped_full += 1
            return
        try:
            message = open_payload(envelope)
            if not isinstance(message, self._topic.carries):
                raise ProtocolError(f"topic {self._topic.name} does not carry {type(message).__name__}")
        except ProtocolError as error:  # its checksum is right, so a repeat would be the same
            self.stats.malformed += 1
            self._held[id] = connection
            self._finish(id, str(error))
            return
        self.stats.received += 1
        self._held[id] = connection
        session.held[id] = None
        account.unfinished += 1
        self._inbox.put(Delivery(envelope, message, connection))
        if self._inbox.full:
            self._router.pump.pause()
        if self._topic.window:
            self._sessions.flush_soon()

    def _rehold(self, id: str, connection: bytes, session: SenderSession) -> None:
        """Acknowledge a held message on the connection that it was repeated on, which may be another one."""
        self._release(id, self._held[id])
        self._held[id] = connection
        session.held[id] = None
        session.account.unfinished += 1

    def _finish(self, id: str, why: str | None) -> None:
        connection = self._held.pop(id, None)
        if connection is None:
            return
        self._finished[id] = why
        if len(self._finished) > REMEMBERED_IDS:
            self._finished.popitem(last=False)
        if why is None:
            self.stats.acked += 1
        else:
            self.stats.refused += 1
            log.info("bus.refused topic=%s message=%s why=%s", self._topic.name, id, why)
        self._release(id, connection)
        self._sessions.queue_ack(connection, id, why)

    def _release(self, id: str, connection: bytes) -> None:
        session = self._sessions.get(connection)
        if session is not None and id in session.held:
            del session.held[id]
            session.account.unfinished -= 1
