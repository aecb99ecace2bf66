"""Sends batched acknowledgements, credit and heartbeats from a receiver to its senders."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from protocol.codec import encode
from protocol.messages import Ack, Heartbeat, Hello
from protocol.topics import Topic
from services.bus.config import BusConfig
from services.bus.router import Router, SendResult
from services.bus.stats import BusStats


@dataclass(slots=True)
class Account:
    """Credit granted to one sender, and its use."""

    granted: int = 0
    """Total number of messages that the sender may send on its connection."""
    seen: int = 0
    """Number of granted messages that have arrived."""
    unfinished: int = 0
    """Number of arrived messages that are neither acknowledged nor refused."""

    @property
    def unused(self) -> int:
        return max(0, self.granted - self.seen)

    @property
    def promised(self) -> int:
        return self.unused + self.unfinished


def top_up(window: int, accounts: Collection[Account], orphans: int = 0) -> list[Account]:
    """Raise grants as far as the window allows; return the raised accounts.

    Args:
        window: number of messages that the receiver processes at a time.
        accounts: accounts of the connected senders.
        orphans: number of unfinished messages of disconnected senders.
    """
    if not accounts:
        return []
    raised: dict[int, Account] = {}

    def grant(account: Account) -> None:
        account.granted = max(account.granted, account.seen) + 1
        raised[id(account)] = account

    for account in accounts:
        if account.promised < 1:
            grant(account)
    ahead = max(1, window // (2 * len(accounts)))
    free = window - orphans - sum(account.promised for account in accounts)
    while free > 0:
        eligible = [account for account in accounts if account.unused < ahead]
        if not eligible:
            break
        grant(min(eligible, key=lambda account: account.promised))
        free -= 1
    return list(raised.values())


log = logging.getLogger(__name__)

MAX_PEERS = 16_384
"""Maximum number of senders per receiver; hellos of further senders are dropped."""
MAX_QUEUED_ACKS = 65_536
"""Maximum number of acknowledgements queued for a sender that does not read.

Further acknowledgements are dropped; the sender gets them when it resends the message.
"""

ANSWER_BYTES = 16 << 20
"""Maximum bytes of several answers in one frame; a frame with one answer may be larger."""


@dataclass(slots=True)
class SenderSession:
    """State of one sender's connection."""

    incarnation: str
    account: Account = field(default_factory=Account)
    """The sender's share of the receiver's window."""
    held: dict[str, None] = field(default_factory=dict)
    """Ids of the sender's messages that are neither acknowledged nor refused."""
    acked: list[str] = field(default_factory=list)
    """Ids to acknowledge in the next ack."""
    refused: dict[str, str] = field(default_factory=dict)
    """Ids to refuse in the next ack -> reason."""
    answers: dict[str, bytes] = field(default_factory=dict)
    """Ids to answer in the next ack -> encoded answer."""


class SenderSessions:
    """Sessions of the senders that sent a hello, by connection.

    Each session gets at most one ack frame per loop iteration, and one heartbeat per `heartbeat_s`.
    """

    def __init__(
        self,
        topic: Topic,
        *,
        run: str,
        incarnation: str,
        config: BusConfig,
        router: Router,
        stats: BusStats,
        unfinished: Callable[[], int],
    ) -> None:
        """Start without sessions.

        Args:
            topic: edge of the receiver; its senders share the topic's window.
            run: name of the run.
            incarnation: incarnation of the receiver.
            config: settings of the bus.
            router: socket for outgoing frames.
            stats: counters of the receiver.
            unfinished: returns the number of unfinished messages, including disconnected senders'.
        """
        self._topic = topic
        self._run = run
        self._incarnation = incarnation
        self._heartbeat_s = config.heartbeat_s
        self.largest_answer = config.max_frame_bytes // 2
        """Bytes that an answer may have: a sender disconnects from whoever sends it a larger frame."""
        self._router = router
        self._stats = stats
        self._count_unfinished = unfinished
        self._sessions: dict[bytes, SenderSession] = {}
        self._unsent: dict[bytes, None] = {}  # connections with an unsent ack or credit, in order
        self._flushing = False
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the heartbeats."""
        self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._on_timer)

    def stop(self) -> None:
        """Flush queued acknowledgements without waiting, and stop the heartbeats."""
        if self._timer is not None:
            self._flush()
            self._timer.cancel()
            self._timer = None

    def get(self, connection: bytes) -> SenderSession | None:
        """Return the session of a connection; None if its sender sent no hello."""
        return self._sessions.get(connection)

    def on_hello(self, connection: bytes, hello: Hello) -> None:
        """Answer a hello with a heartbeat, which lists the sender's held messages."""
        session = self._sessions.get(connection)
        if session is not None and hello.sent <= session.account.seen:
            return  # no message was lost; the regular heartbeat suffices
        if session is None:
            if len(self._sessions) >= MAX_PEERS:
                self._stats.dropped_full += 1
                return
            session = self._sessions[connection] = SenderSession(hello.sender)
            log.debug("bus.peer topic=%s sender=%s role=%s", self._topic.name, hello.sender, hello.role)
        session.account.seen = max(session.account.seen, hello.sent)
        if self._topic.window:
            self._unsent[connection] = None
        self._top_up()
        self._send_heartbeat(connection, session)

    def queue_ack(self, connection: bytes, id: str, why: str | None) -> None:
        """Queue the acknowledgement of a message, or its refusal for `why`."""
        session = self._sessions.get(connection)
        if session is None:
            return
        if len(session.acked) + len(session.refused) >= MAX_QUEUED_ACKS:
            self._stats.dropped_full += 1
            return
        if why is None:
            session.acked.append(id)
        else:
            session.refused[id] = why
        self._unsent[connection] = None
        self.flush_soon()

    def queue_answer(self, connection: bytes, id: str, answer: bytes) -> None:
        """Queue the answer to a message; send queued answers at once above `ANSWER_BYTES`."""
        session = self._sessions.get(connection)
        if session is None:
            return
        session.answers[id] = answer
        self._unsent[connection] = None
        self.flush_soon()

    def flush_soon(self) -> None:
        """Send acknowledgements and credit in the next loop iteration."""
        if not self._flushing and self._timer is not None:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return the messages held, seen and granted (-1: unlimited) per sender, by incarnation."""
        return {
            session.incarnation: {
                "held": len(session.held),
                "seen": session.account.seen,
                "granted": self._credit(session),
            }
            for session in self._sessions.values()
        }

    def _flush(self) -> None:
        self._flushing = False
        if self._timer is None:
            return
        self._top_up()
        for connection in list(self._unsent):
            session = self._sessions.get(connection)
            if session is None:
                del self._unsent[connection]
            else:
                self._send_ack(connection, session)

    def _top_up(self, *, all_sessions: bool = False) -> None:
        window = self._topic.window
        if not window:
            return
        if len(self._sessions) >= window and not all_sessions:
            # Each session already has one promised message and no window is free, except for the sessions
            # with an unsent ack: only those need to be examined.
            candidates, orphans = {c: self._sessions[c] for c in self._unsent if c in self._sessions}, window
        else:
            candidates = self._sessions
            connected = sum(session.account.unfinished for session in candidates.values())
            orphans = self._count_unfinished() - connected
        connections = {id(session.account): connection for connection, session in candidates.items()}
        for account in top_up(window, [session.account for session in candidates.values()], orphans):
            self._unsent[connections[id(account)]] = None

    def _send_ack(self, connection: bytes, session: SenderSession) -> bool:
        """Send queued acks and credit; return False if the next heartbeat must retry."""
        while connection in self._unsent:
            answers = _first_answers(session.answers, min(ANSWER_BYTES, self.largest_answer))
            ack = Ack(
                messages=tuple(session.acked),
                refused=session.refused,
                credit=self._credit(session),
                answers=answers,
            )
            outcome = self._router.send(connection, encode(ack, run=self._run, id=""))
            if outcome is SendResult.FULL:
                return False
            if outcome is SendResult.UNREACHABLE:
                self._remove(connection)
                return False
            session.acked.clear()
            session.refused = {}
            for id in answers:
                del session.answers[id]
            if not session.answers:
                del self._unsent[connection]
        return True

    def _on_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._on_timer)
        self._sequence += 1
        self._top_up(all_sessions=True)
        for connection, session in list(self._sessions.items()):
            self._send_heartbeat(connection, session)

    def _send_heartbeat(self, connection: bytes, session: SenderSession) -> None:
        """Send a heartbeat after all acks; otherwise the sender would resend finished messages."""
        if connection in self._unsent and not self._send_ack(connection, session):
            return
        beat = Heartbeat(
            receiver=self._incarnation,
            sequence=self._sequence,
            held=tuple(session.held),
            seen=session.account.seen,
            credit=self._credit(session),
        )
        if self._router.send(connection, encode(beat, run=self._run, id="")) is SendResult.UNREACHABLE:
            self._remove(connection)

    def _remove(self, connection: bytes) -> None:
        """Remove a closed connection. Its messages stay held; its sender reconnects and resends them."""
        session = self._sessions.pop(connection, None)
        self._unsent.pop(connection, None)
        if session is not None:
            log.debug(
                "bus.peer_gone topic=%s sender=%s held=%d",
                self._topic.name,
                session.incarnation,
                len(session.held),
            )

    def _credit(self, session: SenderSession) -> int:
        return session.account.granted if self._topic.window else -1


def _first_answers(answers: Mapping[str, bytes], max_bytes: int) -> dict[str, bytes]:
    """Return the first answer, and the next answers while the total is at most `max_bytes`."""
    total = itertools.accumulate(map(len, answers.values()))
    return dict(
        item
        for number, (item, size) in enumerate(zip(answers.items(), total, strict=True))
        if not number or size <= max_bytes
    )
