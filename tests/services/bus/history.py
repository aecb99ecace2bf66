"""Runs random histories of a DELIVER edge with two senders and two receivers over real sockets.

A faulty proxy stands before each receiver. The application is played here: a message takes effect in
`World.effects`, keyed by its id as the ledger keys its own, before it is acknowledged. Whatever the history
was, `World.settle` ends all faults and waits until every promise is kept.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from protocol.errors import Unavailable
from protocol.messages import ScoreFailure
from protocol.topics import Topic
from services.bus.receiver import Delivery, Receiver
from services.bus.sender import Declined, Sender
from tests.services.bus.harness import QUICK, Registry, eventually, receiver, score, sender, windowed
from tests.services.bus.middle import Fault, Middle

CONFIG = replace(QUICK, heartbeat_s=0.02, peer_timeout_s=5.0, max_outstanding=20, high_water_mark=16)
REFUSED_EVERY = 5
"""Each group divisible by this is refused."""
ENDS = (0, 1)


@dataclass(frozen=True)
class Move:
    """One action or fault; `end` is the number of a sender or receiver."""

    name: str
    end: int = 0
    count: int = 0
    faults: tuple[tuple[Fault, int], ...] = ()


END = st.sampled_from(ENDS)
FAULTS = st.lists(st.tuples(st.sampled_from(Fault), st.integers(0, 1000)), min_size=1, max_size=8).map(tuple)
MOVES = st.one_of(
    st.builds(Move, st.just("send"), END, st.integers(1, 6)),
    st.builds(Move, st.just("send"), END, st.integers(1, 6)),
    st.builds(Move, st.just("disturb"), END, faults=FAULTS),
    st.builds(Move, st.just("disturb"), END, faults=FAULTS),
    st.builds(
        Move,
        st.sampled_from(["kill_sender", "kill_receiver", "close_receiver", "cut", "hang", "hold", "release"]),
        END,
    ),
    st.builds(Move, st.just("turns"), count=st.integers(1, 20)),
)


@dataclass
class Life:
    """One life of a sender or receiver: it ends when `stop` is set."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class World:
    """The edge, the messages sent on it, and their effects."""

    def __init__(self, window: int) -> None:
        self.topic: Topic = windowed(window)
        self.registry = Registry()
        self.sent: dict[str, int] = {}
        self.effects: Counter[str] = Counter()
        self.refused: set[str] = set()
        self.confirmed: set[str] = set()
        self.unconfirmed: list[dict[str, int]] = [{}, {}]
        """By sender: id -> group of what it has to bring through; it outlives the sender."""
        self.damaged = self.counted = 0
        self.holding = [asyncio.Event(), asyncio.Event()]
        self.middles: list[Middle | None] = [None, None]
        self.lives = {(kind, end): Life() for kind in ("sender", "receiver") for end in ENDS}
        self.outboxes: list[Sender | None] = [None, None]
        self._names = 0

    # -- the two kinds of ends
    def begin(self, kind: str, end: int) -> None:
        life = self.lives[kind, end] = Life()
        self._tasks.create_task(
            self._sender(end, life) if kind == "sender" else self._receiver(end, life), name=f"{kind}.{end}"
        )

    async def _sender(self, end: int, life: Life) -> None:
        async with sender(self.registry, self._name("reward"), topic=self.topic, config=CONFIG) as outbox:
            self.outboxes[end] = outbox
            for id, group in self.unconfirmed[end].items():
                self._tasks.create_task(self._bring_through(outbox, end, id, group), name=id)
            await life.stop.wait()
            self.outboxes[end] = None
        self.counted += outbox.stats.malformed
        life.ended.set()

    async def _receiver(self, end: int, life: Life) -> None:
        name = self._name("ingest")
        async with (
            receiver(name, topic=self.topic, config=CONFIG) as inbox,
            Middle(inbox.endpoint).running() as middle,
        ):
            self.middles[end] = middle
            self.registry[name] = middle.endpoint
            async with asyncio.TaskGroup() as tasks:
                handling = tasks.create_task(self._handle(inbox, middle, end))
                await life.stop.wait()
                handling.cancel()
            del self.registry[name]
            self.middles[end] = None
        self.damaged += middle.damaged
        self.counted += (
            inbox.stats.malformed
        )  # what a broken connection still brings after its peer was forgotten is `unknown_peer`
        life.ended.set()

    async def _bring_through(self, outbox: Sender, end: int, id: str, group: int) -> None:
        try:
            await outbox.send(score(group), id=id)
        except Unavailable:
            return  # closed; its successor tries again
        except Declined as declined:
            if id not in self.refused or declined.why != f"refused {group}":
                raise
        else:
            assert self.effects[id], "confirmed, but it had no effect"
        self.confirmed.add(id)
        del self.unconfirmed[end][id]

    async def _handle(self, inbox: Receiver, middle: Middle, end: int) -> None:
        """Take messages; while `holding` is set, only hold them."""
        seen: set[str] = set()
        held: list[Delivery] = []
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.005):
                    delivery = await inbox.receive()
                    held.append(delivery)
                    id, message = delivery.envelope.id, delivery.message
                    assert isinstance(message, ScoreFailure)
                    assert self.sent.get(id) == message.group, "a message that nobody sent"
                    assert id not in seen, "handed out twice"
                    seen.add(id)
                    if self.topic.window:
                        count = inbox.snapshot()["held"]
                        assert isinstance(count, int)
                        assert count <= self.topic.window + middle.connections
            while held and not self.holding[end].is_set():
                self._finish(inbox, held.pop())

    def _finish(self, inbox: Receiver, delivery: Delivery) -> None:
        id, group = delivery.envelope.id, self.sent[delivery.envelope.id]
        if group % REFUSED_EVERY == 0:
            self.refused.add(id)
            inbox.refuse(delivery, f"refused {group}")
        else:
            self.effects[id] = 1
            inbox.ack(delivery)

    def _name(self, role: str) -> str:
        self._names += 1
        return f"{role}.{self._names}"

    # -- moves
    async def play(self, move: Move) -> None:
        """Carry out a move; returns when it is done, not when its consequences are."""
        middle, outbox = self.middles[move.end], self.outboxes[move.end]
        match move.name:
            case "send" if outbox is not None:
                for _ in range(move.count):
                    group = len(self.sent)
                    id = f"m{group}"
                    self.sent[id] = self.unconfirmed[move.end][id] = group
                    self._tasks.create_task(self._bring_through(outbox, move.end, id, group), name=id)
            case "disturb" if middle is not None:
                middle.plan.extend(move.faults)
            case "cut" if middle is not None:
                middle.cut()
            case "hang" if middle is not None:
                middle.flowing.clear()
            case "hold":
                self.holding[move.end].set()
            case "release":
                self.holding[move.end].clear()
            case "kill_sender":
                await self.end("sender", move.end, abruptly=True)
            case "kill_receiver" | "close_receiver":
                await self.end("receiver", move.end, abruptly=move.name == "kill_receiver")
            case "turns":
                await asyncio.sleep(0.002 * move.count)

    async def end(self, kind: str, end: int, *, abruptly: bool) -> None:
        """End one life and begin the next.

        Abruptly: its connections break first, so that it can send nothing more.
        """
        life = self.lives[kind, end]
        if abruptly:
            for middle in self.middles if kind == "sender" else [self.middles[end]]:
                if middle is not None:
                    middle.cut()
        life.stop.set()
        await life.ended.wait()
        self.begin(kind, end)
        await self.up()

    async def up(self) -> None:
        """Wait until every end is alive."""
        await eventually(lambda: None not in (*self.middles, *self.outboxes))

    async def settle(self) -> None:
        """End all faults and wait until every message that was sent is finished."""
        await self.up()
        for end, middle in enumerate(self.middles):
            assert middle is not None
            middle.plan.clear()
            middle.flowing.set()
            self.holding[end].clear()
        await eventually(lambda: not any(self.unconfirmed))
        assert self.confirmed == set(self.sent)
        assert self.confirmed == set(self.effects) | self.refused
        for outbox in self.outboxes:
            assert outbox is not None
            assert outbox.outstanding == 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["World"]:
        async with asyncio.TaskGroup() as self._tasks:
            for kind, end in self.lives:
                self.begin(kind, end)
            await self.up()
            yield self
            for life in self.lives.values():
                life.stop.set()
        assert self.counted <= self.damaged
