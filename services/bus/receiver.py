"""Implements the receiving end of a DELIVER edge: each message arrives once and is acked or refused.

A message is *held* from its arrival until `ack` or `refuse`. Its id is then remembered, so that a repeat is
answered at once. Everything is bounded. `high_water_mark` bounds the messages waiting for `receive`; a full
queue pauses the socket, and the senders wait. The senders' `max_outstanding` or the topic's window bounds
held messages, `REMEMBERED_IDS` the ids, and `peers.py` the senders and their queued acknowledgements.
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
"""Number of ids of finished messages that a receiver remembers (8 MB); the oldest are forgotten first.

A repeat of a forgotten message is processed again without effect, because the ledger's transitions are
idempotent.
"""
MAX_ID_CHARACTERS = 128
"""Maximum length of a message id; longer ids are malformed."""


@dataclass(slots=True)
class Delivery:
    """A message that is held until `Receiver.ack` or `Receiver.refuse`."""

    envelope: Envelope
    message: AnyMessage
    peer: bytes
    """Connection on which the message arrived."""


class Receiver:
    """Binding end of a DELIVER edge: receives, acknowledges, and sends heartbeats that list held messages.

    Use as `async with Receiver(...) as receiver`, or call `start` and `close`. Registers callbacks on the
    loop, but creates no task.
    """

    def __init__(self, topic: Topic, *, run: str, incarnation: str, config: BusConfig) -> None:
        if topic.pattern is not Pattern.DELIVER:
            raise TypeError(f"topic {topic.name} is not a {Pattern.DELIVER} topic")
        self.stats = BusStats()
        self.endpoint = ""
        """Endpoint to register; empty before `start`."""
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
        """Bind the socket; return the endpoint to register.

        Raises:
            SettingsError: the port is in use, or the address requires keys that do not exist.
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

        Cancelling loses no message.

        Raises:
            Unavailable: the receiver is closed.
        """
        delivery = await self._inbox.get()
        self._router.pump.resume()
        return delivery

    async def receive_waiting(self, max_messages: int) -> list[Delivery]:
        """Wait for the next message; return it with the messages queued behind it, at most `max_messages`."""
        batch = [await self.receive()]
        while self._inbox and len(batch) < max_messages:
            batch.append(await self.receive())
        return batch

    def ack(self, delivery: Delivery) -> None:
        """Acknowledge a message that took effect, in the next loop iteration. Idempotent."""
        self._finish(delivery.envelope.id, None)

    def answer(self, delivery: Delivery, answer: bytes) -> None:
        """Acknowledge a message with an answer, an encoded message that `Sender.send` returns.

        The id is not remembered: a repeat is processed and answered again. An answer over half of
        `bus.max_frame_bytes` refuses the message, because no repeat could be answered.
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
        """Refuse a message permanently: it is not resent, and `Sender.send` raises `Declined(why)`."""
        self._finish(delivery.envelope.id, why)

    async def close(self) -> None:
        """Flush queued acknowledgements without waiting, and close the socket, also if cancelled.

        The senders send held messages to another receiver.
        """
        if self._closed:
            return
        self._closed = True
        self._sessions.stop()
        try:
            await asyncio.sleep(0)
        finally:
            self._router.close()
            self._inbox.close()

    def snapshot(self) -> dict[str, object]:
        """Return a summary of queues: messages waiting for `receive`, messages held, and the senders."""
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
                # the next heartbeat then makes the sender resend the message of this frame
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
        except ProtocolError as error:  # the checksum is valid, so a resend would be malformed, too
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
        """Move a held message to the connection on which it was resent, which may be another one."""
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
