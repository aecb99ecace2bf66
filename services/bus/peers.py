"""What a receiver tells its senders: acknowledgements in batches, credit, and by heartbeat what it holds."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from protocol.codec import encode
from protocol.messages import Ack, Heartbeat, Hello
from protocol.topics import Topic
from services.bus.config import BusConfig
from services.bus.credit import Account, top_up
from services.bus.router import Outcome, Router
from services.bus.stats import BusStats

log = logging.getLogger(__name__)

MAX_PEERS = 16_384
MAX_OWED = 65_536
"""Acknowledgements that wait for one peer that does not read; more are dropped, and told when the message
comes again."""


@dataclass(slots=True)
class Peer:
    """One connection of a sender."""

    incarnation: str
    account: Account = field(default_factory=Account)
    held: dict[str, None] = field(default_factory=dict)
    """Ids of its messages that are neither acknowledged nor refused."""
    acked: list[str] = field(default_factory=list)
    """To be told in the next ack."""
    refused: dict[str, str] = field(default_factory=dict)


class SenderSessions:
    """The senders that said hello, by connection. One ack frame per peer and loop iteration; one heartbeat
    per `heartbeat_s`."""

    def __init__(
        self,
        topic: Topic,
        *,
        run: str,
        incarnation: str,
        config: BusConfig,
        router: Router,
        stats: BusStats,
        held: Callable[[], int],
    ) -> None:
        """`held()`: unfinished messages of the whole receiver, those of gone peers included."""
        self._topic = topic
        self._run = run
        self._incarnation = incarnation
        self._heartbeat_s = config.heartbeat_s
        self._router = router
        self._stats = stats
        self._held = held
        self._peers: dict[bytes, Peer] = {}
        self._owing: dict[bytes, None] = {}  # connections with something to be told
        self._flushing = False
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to send heartbeats."""
        self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._beat)

    def stop(self) -> None:
        """Tell what is owed, as far as the socket takes it at once, and fall silent."""
        if self._timer is not None:
            self._flush()
            self._timer.cancel()
            self._timer = None

    def get(self, connection: bytes) -> Peer | None:
        return self._peers.get(connection)

    def on_hello(self, connection: bytes, hello: Hello) -> None:
        """Answer a hello with a heartbeat, so that the peer learns what of all that it sent is held."""
        peer = self._peers.get(connection)
        if peer is not None and hello.sent <= peer.account.seen:
            return  # nothing was lost; the next heartbeat says so
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                self._stats.dropped_full += 1
                return
            peer = self._peers[connection] = Peer(hello.sender)
            log.debug("bus.peer topic=%s sender=%s role=%s", self._topic.name, hello.sender, hello.role)
        peer.account.seen = max(peer.account.seen, hello.sent)
        if self._topic.window:
            self._owing[connection] = None
        self._top_up()
        self._heartbeat(connection, peer)

    def queue_ack(self, connection: bytes, id: str, why: str | None) -> None:
        """Have a peer told that a message is finished: refused for `why`, or acknowledged."""
        peer = self._peers.get(connection)
        if peer is None:
            return
        if len(peer.acked) + len(peer.refused) >= MAX_OWED:
            self._stats.dropped_full += 1
            return
        if why is None:
            peer.acked.append(id)
        else:
            peer.refused[id] = why
        self._owing[connection] = None
        self.flush_soon()

    def flush_soon(self) -> None:
        """Send acknowledgements and credit in the next loop iteration."""
        if not self._flushing and self._timer is not None:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Per sender: messages held, seen and granted (-1: no limit)."""
        return {
            peer.incarnation: {
                "held": len(peer.held),
                "seen": peer.account.seen,
                "granted": self._credit(peer),
            }
            for peer in self._peers.values()
        }

    def _flush(self) -> None:
        self._flushing = False
        if self._timer is None:
            return
        self._top_up()
        for connection in list(self._owing):
            peer = self._peers.get(connection)
            if peer is None:
                del self._owing[connection]
            else:
                self._tell(connection, peer)

    def _top_up(self, *, everybody: bool = False) -> None:
        window = self._topic.window
        if not window:
            return
        if len(self._peers) >= window and not everybody:
            # Each has one message promised and nothing is free, but for those who are told of an end: there
            # is no need to look at all.
            among, orphans = {c: self._peers[c] for c in self._owing if c in self._peers}, window
        else:
            among, orphans = (
                self._peers,
                self._held() - sum(peer.account.unfinished for peer in self._peers.values()),
            )
        connections = {id(peer.account): connection for connection, peer in among.items()}
        for account in top_up(window, [peer.account for peer in among.values()], orphans):
            self._owing[connections[id(account)]] = None

    def _tell(self, connection: bytes, peer: Peer) -> bool:
        """Send what a peer is owed. False if it cannot take it now: the next heartbeat tries again."""
        ack = Ack(messages=tuple(peer.acked), refused=peer.refused, credit=self._credit(peer))
        outcome = self._router.send(connection, encode(ack, run=self._run, id=""))
        if outcome is Outcome.FULL:
            return False
        del self._owing[connection]
        if outcome is Outcome.GONE:
            self._forget(connection)
            return False
        peer.acked.clear()
        peer.refused = {}
        return True

    def _beat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._heartbeat_s, self._beat)
        self._sequence += 1
        self._top_up(everybody=True)
        for connection, peer in list(self._peers.items()):
            self._heartbeat(connection, peer)

    def _heartbeat(self, connection: bytes, peer: Peer) -> None:
        """Tell what is held; only after all acknowledgements, or the peer would send again what is done."""
        if connection in self._owing and not self._tell(connection, peer):
            return
        beat = Heartbeat(
            receiver=self._incarnation,
            sequence=self._sequence,
            held=tuple(peer.held),
            seen=peer.account.seen,
            credit=self._credit(peer),
        )
        if self._router.send(connection, encode(beat, run=self._run, id="")) is Outcome.GONE:
            self._forget(connection)

    def _forget(self, connection: bytes) -> None:
        """A connection is gone. What it sent stays held; its sender connects anew and sends it again."""
        peer = self._peers.pop(connection, None)
        self._owing.pop(connection, None)
        if peer is not None:
            log.debug(
                "bus.peer_gone topic=%s sender=%s held=%d", self._topic.name, peer.incarnation, len(peer.held)
            )

    def _credit(self, peer: Peer) -> int:
        return peer.account.granted if self._topic.window else -1
