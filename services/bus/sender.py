"""Sends one end of a DELIVER edge: each message to one live receiver, repeated until it is finished.

A message is sent again when its link is lost, or when a heartbeat shows that the receiver has seen it and
neither holds it nor acknowledged it; never because of time alone. Unfinished messages are bounded by
`max_outstanding`: `send` then waits for a slot, which an acknowledgement, a refusal or a cancelled `send`
frees.
"""

import asyncio
import logging
from collections import OrderedDict

import zmq

from protocol.codec import decode, encode
from protocol.errors import FrameTooLarge, ProtocolError, Reason, Refused, TetherError, Unavailable
from protocol.ids import new_token
from protocol.messages import Ack, AnyMessage, Heartbeat
from protocol.topics import Pattern, Topic
from services.bus.config import BusConfig
from services.bus.links import Discover, Link, LinkedSocket, Links
from services.bus.stats import BusStats

log = logging.getLogger(__name__)


class Declined(TetherError):
    """Raised by `Sender.send` if the receiver refused the message for good, for `why`."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Pending:
    """Message that is neither acknowledged, refused nor cancelled."""

    __slots__ = ("done", "frame", "id", "link", "ordinal")

    def __init__(self, id: str, frame: bytes) -> None:
        self.id = id
        self.frame = frame
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.link: Link[Pending] | None = None
        """Connection that it was sent on last; None while none could take it."""
        self.ordinal = 0
        """Number of the message on its link, from 1."""


class Sender(LinkedSocket):
    """Connecting end of a DELIVER edge, with a link to every live receiver; used by `async with`.

    `discover()` returns receiver incarnation -> endpoint. It is called every `heartbeat_s`, and raises
    TetherError or OSError while the registry cannot be read; the links then stay as they are.
    """

    def __init__(
        self, topic: Topic, *, run: str, incarnation: str, role: str, config: BusConfig, discover: Discover
    ) -> None:
        if topic.pattern is not Pattern.DELIVER:
            raise TypeError(f"topic {topic.name} is not a {Pattern.DELIVER} topic")
        self.stats = BusStats()
        self._topic = topic
        self._run = run
        self._config = config
        self._pending: dict[str, Pending] = {}
        # messages of `_pending` that no link could take yet
        self._waiting: OrderedDict[str, Pending] = OrderedDict()
        self._slots = asyncio.Semaphore(config.max_outstanding)  # calls of `send`
        self._closed = False
        self._links: Links[Pending] = Links(
            topic,
            run=run,
            incarnation=incarnation,
            role=role,
            config=config,
            stats=self.stats,
            discover=discover,
            on_frame=self._on_frame,
            on_lost=self._on_lost,
            on_writable=self._flush,
        )

    @property
    def outstanding(self) -> int:
        """Number of messages that are not finished."""
        return len(self._pending)

    async def send(
        self,
        message: AnyMessage,
        *,
        id: str | None = None,
        epoch: str = "",
        group: int = -1,
        token: str = "",
    ) -> bytes:
        """Deliver a message; return when a receiver has acknowledged it, with its answer, often empty.

        Waits while there is no receiver, no credit or no slot: bound it with `asyncio.timeout`. If it is
        cancelled the message is not sent again, and may or may not have taken effect.

        Args:
            message: of a type that the topic carries.
            id: message id, a new one by default; the receiver deduplicates messages with the same id.
            epoch: epoch of the lease, for the envelope.
            group: prompt group, for the envelope.
            token: token of the lease, for the envelope.

        Raises:
            Declined: if a receiver refused it for good.
            Refused: DUPLICATE, if a message with this id is being sent.
            FrameTooLarge: if it exceeds the frame limit.
            Unavailable: if the sender was closed.
        """
        if not isinstance(message, self._topic.carries):
            raise TypeError(f"topic {self._topic.name} does not carry {type(message).__name__}")
        id = id or new_token()
        frame = encode(message, run=self._run, id=id, epoch=epoch, group=group, token=token)
        most = self._config.max_frame_bytes
        if len(frame) > most:
            raise FrameTooLarge(f"message {id} of {len(frame)} bytes is over bus.max_frame_bytes {most}")
        self._check_new(id)
        async with self._slots:
            self._check_new(id)
            pending = self._submit(id, frame)
            try:
                return await pending.done
            finally:
                if self._pending.get(id) is pending:
                    self._forget(pending)

    def snapshot(self) -> dict[str, object]:
        """Return who waits for whom: messages without a receiver, and what each receiver has not finished."""
        now_s = asyncio.get_running_loop().time()
        return {
            "topic": self._topic.name,
            "outstanding": len(self._pending),
            "waiting": len(self._waiting),
            "receivers": {
                link.incarnation: {
                    "outstanding": len(link.outstanding),
                    "free": self._free(link),
                    "ready": link.ready,
                    "silent_s": round(now_s - link.heard_s, 3),
                }
                for link in self._links.links.values()
            },
        }

    # -- messages out
    def _check_new(self, id: str) -> None:
        if self._closed:
            raise Unavailable(f"sender of {self._topic.name} is closed")
        if id in self._pending:
            raise Refused(Reason.DUPLICATE, f"message {id} is being sent")

    def _submit(self, id: str, frame: bytes) -> Pending:
        pending = Pending(id, frame)
        self._pending[id] = pending
        if self._waiting or not self._dispatch(pending):
            self._waiting[id] = pending
        self.stats.sent += 1
        return pending

    def _dispatch(self, pending: Pending) -> bool:
        """Send a message to the receiver with the most free credit; false if none can take it."""
        while (link := self._pick()) is not None:
            if link.send(pending.frame):
                link.sent += 1
                pending.link = link
                pending.ordinal = link.sent
                link.outstanding[pending.id] = pending
                return True
        return False

    def _pick(self) -> Link[Pending] | None:
        """Return the live link with most free credit, of equal ones that with fewest outstanding messages."""
        best: Link[Pending] | None = None
        best_free = 0
        for link in self._links.links.values():
            if not link.ready or link.full or link.lost:
                continue
            free = self._free(link)
            if free > best_free or (
                best is not None and free == best_free and len(link.outstanding) < len(best.outstanding)
            ):
                best, best_free = link, free
        return best

    def _free(self, link: Link[Pending]) -> int:
        """Return how many more messages a link may take."""
        if link.credit < 0:
            return self._config.max_outstanding - len(link.outstanding)
        return link.credit - link.sent

    def _flush(self) -> None:
        while self._waiting:
            id = next(iter(self._waiting))
            if not self._dispatch(self._waiting[id]):
                return
            del self._waiting[id]

    def _send_again(self, pending: Pending, reason: str) -> None:
        """Queue a message again, before those that were never sent."""
        self.stats.resent += 1
        log.info("bus.resend topic=%s message=%s reason=%s", self._topic.name, pending.id, reason)
        if pending.link is not None:
            pending.link.outstanding.pop(pending.id, None)
            pending.link = None
        self._waiting[pending.id] = pending
        self._waiting.move_to_end(pending.id, last=False)

    # -- frames in
    def _on_frame(self, link: Link[Pending], frame: zmq.Frame) -> None:
        envelope, message = decode(frame.buffer)
        if envelope.run != self._run or not isinstance(message, Ack | Heartbeat):
            raise ProtocolError(f"{type(message).__name__} of run {envelope.run!r}")
        if isinstance(message, Ack):
            self._on_ack(message)
        elif link.heartbeat(message):
            self._on_heartbeat(link, message)
        else:
            return
        if message.credit >= 0 or not self._topic.window:
            link.credit = message.credit
        self._flush()

    def _on_ack(self, ack: Ack) -> None:
        for id in ack.messages:
            if self._finish(id, b""):
                self.stats.acked += 1
        for id, answer in ack.answers.items():
            if self._finish(id, answer):
                self.stats.acked += 1
        for id, why in ack.refused.items():
            if self._finish(id, Declined(why)):
                self.stats.refused += 1

    def _on_heartbeat(self, link: Link[Pending], beat: Heartbeat) -> None:
        ids = frozenset(beat.held)
        lost = []
        for pending in link.outstanding.values():
            if pending.ordinal > beat.seen:
                break
            if pending.id not in ids:
                lost.append(pending)
        for pending in reversed(lost):
            self._send_again(pending, "not_held")

    def _on_lost(self, link: Link[Pending]) -> None:
        for pending in reversed(list(link.outstanding.values())):
            self._send_again(pending, link.lost)
        self._flush()

    # -- the end of a message
    def _finish(self, id: str, end: bytes | Exception) -> bool:
        pending = self._pending.get(id)
        if pending is None:
            return False
        self._forget(pending)
        if pending.done.done():
            return True  # its `send` was cancelled in this iteration of the loop
        if isinstance(end, bytes):
            pending.done.set_result(end)
        else:
            pending.done.set_exception(end)
        return True

    def _forget(self, pending: Pending) -> None:
        del self._pending[pending.id]
        if pending.link is None:
            self._waiting.pop(pending.id, None)
        else:
            pending.link.outstanding.pop(pending.id, None)

    def _close(self) -> None:
        self._closed = True
        for pending in list(self._pending.values()):
            self._finish(pending.id, Unavailable(f"sender of {self._topic.name} is closed"))
