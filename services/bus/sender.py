"""Implements the sending end of a DELIVER edge: each message goes to one live receiver until finished.

A message is resent when its link is lost, or when a heartbeat shows that the receiver has seen the message
and neither holds nor acknowledged it. A timeout alone never causes a resend. `max_outstanding` bounds the
unfinished messages: `send` then waits for a slot, which an acknowledgement, a refusal or a cancelled `send`
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
    """Raised by `Sender.send` if the receiver permanently refused the message, for `why`."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Pending:
    """A message that is neither acknowledged, refused nor cancelled."""

    __slots__ = ("done", "frame", "id", "link", "ordinal")

    def __init__(self, id: str, frame: bytes) -> None:
        self.id = id
        self.frame = frame
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.link: Link[Pending] | None = None
        """Link on which the message was sent last; None until a link accepts the message."""
        self.ordinal = 0
        """Sequence number of the message on its link, from 1."""


class Sender(LinkedSocket):
    """Connecting end of a DELIVER edge, linked to every live receiver; use with `async with`.

    `discover()` returns receiver incarnation -> endpoint. `discover` is called every `heartbeat_s`, and
    raises TetherError or OSError while the registry cannot be read; the links then do not change.
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
        # messages in `_pending` that no link has accepted yet
        self._waiting: OrderedDict[str, Pending] = OrderedDict()
        self._slots = asyncio.Semaphore(config.max_outstanding)  # one per call of `send`
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
        """Number of unfinished messages."""
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
        """Deliver a message; return the receiver's answer, often empty, once acknowledged.

        Waits while there is no receiver, no credit or no slot; use `asyncio.timeout` to bound the wait. A
        cancelled message is not resent, and may have taken effect.

        Args:
            message: message of a type that the topic carries.
            id: message id, by which receivers deduplicate; a new id by default.
            epoch: epoch of the lease, for the envelope.
            group: prompt group, for the envelope.
            token: token of the lease, for the envelope.

        Raises:
            Declined: a receiver permanently refused the message.
            Refused: DUPLICATE, a message with this id is being sent.
            FrameTooLarge: the message exceeds the frame limit.
            Unavailable: the sender is closed.
        """
        if not isinstance(message, self._topic.carries):
            raise TypeError(f"topic {self._topic.name} does not carry {type(message).__name__}")
        id = id or new_token()
        frame = encode(message, run=self._run, id=id, epoch=epoch, group=group, token=token)
        max_bytes = self._config.max_frame_bytes
        if len(frame) > max_bytes:
            raise FrameTooLarge(f"message {id} of {len(frame)} bytes is over bus.max_frame_bytes {max_bytes}")
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
        """Return a summary of queues: messages without a receiver, and unfinished messages per receiver."""
        now_s = asyncio.get_running_loop().time()
        return {
            "topic": self._topic.name,
            "outstanding": len(self._pending),
            "waiting": len(self._waiting),
            "receivers": {
                link.incarnation: {
                    "outstanding": len(link.outstanding),
                    "free": self._free_credit(link),
                    "ready": link.ready,
                    "silent_s": round(now_s - link.last_frame_s, 3),
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
        """Send a message to the receiver with the most free credit; return False if no receiver has any."""
        while (link := self._pick_link()) is not None:
            if link.send(pending.frame):
                link.sent += 1
                pending.link = link
                pending.ordinal = link.sent
                link.outstanding[pending.id] = pending
                return True
        return False

    def _pick_link(self) -> Link[Pending] | None:
        """Return the live link with the most free credit; ties go to the fewest outstanding messages."""
        best: Link[Pending] | None = None
        best_free = 0
        for link in self._links.links.values():
            if not link.ready or link.full or link.lost:
                continue
            free = self._free_credit(link)
            if free > best_free or (
                best is not None and free == best_free and len(link.outstanding) < len(best.outstanding)
            ):
                best, best_free = link, free
        return best

    def _free_credit(self, link: Link[Pending]) -> int:
        """Return the number of further messages that a link may carry."""
        if link.credit < 0:
            return self._config.max_outstanding - len(link.outstanding)
        return link.credit - link.sent

    def _flush(self) -> None:
        while self._waiting:
            id = next(iter(self._waiting))
            if not self._dispatch(self._waiting[id]):
                return
            del self._waiting[id]

    def _requeue(self, pending: Pending, reason: str) -> None:
        """Queue a message for resending, before messages that were never sent."""
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
        missing = []
        for pending in link.outstanding.values():
            if pending.ordinal > beat.seen:
                break
            if pending.id not in ids:
                missing.append(pending)
        for pending in reversed(missing):
            self._requeue(pending, "not_held")

    def _on_lost(self, link: Link[Pending]) -> None:
        for pending in reversed(list(link.outstanding.values())):
            self._requeue(pending, link.lost)
        self._flush()

    # -- the end of a message
    def _finish(self, id: str, end: bytes | Exception) -> bool:
        pending = self._pending.get(id)
        if pending is None:
            return False
        self._forget(pending)
        if pending.done.done():
            return True  # its `send` was cancelled in this loop iteration
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
