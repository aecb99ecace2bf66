"""What can happen to a run, on Redis and on the oracle in memory at once: each move calls both, and they must
answer the same."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from protocol.errors import Reason, Refused
from protocol.lifecycle import GroupState
from protocol.staleness import Bound, Policy, trainable_counts
from services.ledger.interface import Lease, Peer, TakenBatch
from tests.contracts.ledger_rebuild import builder_of, journal_of, snapshot_of
from tests.contracts.ledger_rig import MemoryRig, RedisRig, spec

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
ENGINES = ("a", "b", "c")
REASONS = ("filter", "reward")
Pick = Callable[[Sequence[Any]], Any]


class Moves(RuleBasedStateMachine):
    """Both ledgers side by side, and what their callers know of them."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.calls = 0
        self.last: Callable[[Any], Awaitable[Any]] | None = None
        """The newest call, if it was not refused."""
        self.request = ""
        self.epochs = ["e0"]
        self.leases: list[Lease] = []
        self.taken: TakenBatch | None = None
        self.events: list[Any] = []
        options: dict[str, Any] = {"tokens": lambda: f"t{self.calls}"}
        self.memory = MemoryRig(**options)
        self.redis: RedisRig = self.runner.run(RedisRig.start(self.url, **options))

    def both(self, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Result or refusal of a call on both ledgers, which must be equal."""

        async def outcome(ledger: Any) -> Any:
            try:
                return await call(ledger)
            except Refused as refusal:
                return refusal.reason

        self.calls += 1
        expected = self.runner.run(outcome(self.memory.ledger))
        found = self.runner.run(outcome(self.redis.ledger))
        assert found == expected
        self.last = None if isinstance(expected, Reason) else call
        self.answer = expected
        return expected

    def lose_answer(self) -> None:
        """The caller of the newest call has not got its answer and makes it again: the answer is the same,
        and nothing changes."""
        call, answer, before = self.last, self.answer, self.memory.ledger.run_state.sequence
        if call is not None:
            assert self.both(call) == answer
            assert self.memory.ledger.run_state.sequence == before

    @property
    def version(self) -> int:
        return self.memory.ledger.run_state.version

    @property
    def newest(self) -> int:
        """Number of the newest event that was read."""
        return int(self.events[-1]["seq"]) if self.events else 0

    def chosen(self, pick: Pick) -> Lease | None:
        return pick(self.leases[-8:]) if self.leases else None

    def some_epoch(self, pick: Pick) -> str:
        """The newest epoch, or now and then the one before."""
        return self.epochs[-2 if pick(range(0, 8)) == 7 and len(self.epochs) > 1 else -1]

    # -- what brings a run forward

    def lease(self, pick: Pick) -> None:
        engine, again = pick(ENGINES), pick(range(0, 10)) == 9
        request = self.request if again else f"r{self.calls}"
        self.request = request
        lease = self.both(
            lambda ledger: ledger.lease(request=request, engine=engine, holder=engine, lease_ms=HOUR_MS)
        )
        if isinstance(lease, Lease):
            self.leases.append(lease)

    def accept(self, pick: Pick) -> None:
        live = self.memory.ledger.run_state.of(GroupState.LEASED)
        if live:
            group = pick(live)
            counts = {self.version: pick(range(0, 3))}
            counts[group.version] = counts.get(group.version, 0) + pick(range(0, 4))
            number, token = group.group, group.token
            self.both(lambda ledger: ledger.accept(number, token, counts))

    def apply(self, pick: Pick) -> None:
        engine, version = pick(ENGINES), self.version
        self.both(lambda ledger: ledger.applied(engine, self.epochs[-1], version))

    def take(self, pick: Pick) -> None:
        epoch = self.some_epoch(pick)
        taken = self.both(lambda ledger: ledger.take(epoch))
        if isinstance(taken, TakenBatch):
            self.taken = taken

    def commit(self, pick: Pick) -> None:
        taken = self.taken
        if taken is None:
            return
        trained = {
            group.group: trainable_counts(taken.step, group.counts, group.max_staleness)
            for group in taken.groups
        }
        spoil = pick(["", "", "", "", "", "all", "over", "fewer", "epoch"])
        if spoil == "all":
            trained = {group.group: dict(group.counts) for group in taken.groups}
        elif spoil == "over":
            trained[taken.groups[0].group] = {taken.step: 1000}
        elif spoil == "fewer":
            del trained[taken.groups[0].group]
        epoch = "e?" if spoil == "epoch" else self.epochs[-1]
        name = f"{taken.step}-{self.calls}".encode()
        self.both(
            lambda ledger: ledger.commit(
                epoch, taken.step, trained, digest=taken.step + 1, report=name, manifest=name
            )
        )

    # -- what may happen to it

    def expire(self, pick: Pick) -> None:
        live = self.memory.ledger.run_state.live()
        if live:
            group = pick(live)
            self.memory.expire(group.group)
            self.redis.expire(group.group)

    def jump(self, pick: Pick) -> None:
        ms = pick((DAY_MS, -DAY_MS, 2 * DAY_MS, -HOUR_MS))
        self.memory.jump(ms)
        self.redis.jump(ms)

    def extend(self, pick: Pick) -> None:
        if lease := self.chosen(pick):
            self.both(lambda ledger: ledger.extend(lease.group, lease.token, HOUR_MS))

    def release(self, pick: Pick) -> None:
        if lease := self.chosen(pick):
            self.both(lambda ledger: ledger.release(lease.group, lease.token, "tired"))

    def accept_old(self, pick: Pick) -> None:
        if lease := self.chosen(pick):
            self.both(lambda ledger: ledger.accept(lease.group, lease.token, {lease.version: 1}))

    def lost(self, pick: Pick) -> None:
        scored = self.memory.ledger.run_state.scored()
        if scored and pick((False, True)):
            group = pick(scored)
            number, token = group.group, group.token
            self.both(lambda ledger: ledger.lost(number, token))
        elif lease := self.chosen(pick):
            self.both(lambda ledger: ledger.lost(lease.group, lease.token))

    def drop(self, pick: Pick) -> None:
        reason, wasted = pick(REASONS), pick(range(0, 10))
        if lease := self.chosen(pick):
            self.both(lambda ledger: ledger.drop(lease.group, lease.token, reason, wasted))

    def no_signal(self, pick: Pick) -> None:
        tokens, reward, most = pick(range(0, 10)), pick((0.0, 0.333333, 1.0)), pick((0, 0, 1, 2))
        if lease := self.chosen(pick):
            self.both(lambda ledger: ledger.filter(lease.group, lease.token, tokens, reward, most))

    def applied(self, pick: Pick) -> None:
        engine, version, epoch = pick(ENGINES), self.version - pick(range(-1, 3)), self.some_epoch(pick)
        self.both(lambda ledger: ledger.applied(engine, epoch, max(0, version)))

    def checkpointed(self, pick: Pick) -> None:
        version = max(0, self.version - pick(range(-1, 3)))
        self.both(lambda ledger: ledger.checkpointed(version))

    def set_bound(self, pick: Pick) -> None:
        E, B = pick((None, 0, 1, 2, 3)), pick((None, 1, 2, 3, 4))
        policy = pick((None, *Policy))
        found = self.both(lambda ledger: ledger.set_bound(max_staleness=E, groups_per_step=B, policy=policy))
        assert found is None or isinstance(found, Bound)

    def drain(self, pick: Pick) -> None:
        self.both(lambda ledger: ledger.drain())
        self.lease(pick)
        self.both(lambda ledger: ledger.drain(False))

    def create_again(self, pick: Pick) -> None:
        again = spec("x", steps=pick(range(1, 61)), prompts=self.spec.prompts, max_attempts=3, drop_window=20)
        self.both(lambda ledger: ledger.create(again))

    def publish(self, pick: Pick) -> None:
        content, version, epoch = (
            pick((b"", b"\xff")),
            self.version - pick(range(0, 2)),
            self.some_epoch(pick),
        )
        self.both(lambda ledger: ledger.publish(epoch, content, version))

    def process(self, pick: Pick) -> None:
        name = pick(ENGINES)
        self.both(lambda ledger: ledger.register(Peer("rollout", name, {"n": self.calls}), HOUR_MS))
        self.both(lambda ledger: ledger.peers())
        if pick((False, True)):
            is_refuted = pick((False, False, True))
            self.both(lambda ledger: ledger.unregister(name, refuted=is_refuted))

    def archived(self, pick: Pick) -> None:
        self.both(lambda ledger: ledger.archived(self.newest))

    def restart(self, pick: Pick) -> None:
        """A new trainer; it may stand where the ledger stands, or behind, or on other weights, or die before
        it resumes."""
        epoch = f"e{len(self.epochs)}"
        self.both(lambda ledger: ledger.claim(epoch))
        self.epochs.append(epoch)
        version = max(0, self.version - pick((0, 0, 0, 1, 2, 3)))
        digest = pick((version, version, version, 999))
        for _ in range(pick((0, 2, 2, 2, 2))):
            self.both(lambda ledger: ledger.resume(epoch, version, digest))

    def rebuild(self, pick: Pick) -> None:
        """The server loses its newest events; the archive ends somewhere, and the journal has the accepts and
        commits after that."""
        archive = self.events[: max(1, len(self.events) - pick((0, 1, 2, 5, 20)))]
        epoch = f"e{len(self.epochs)}"
        builder = builder_of(archive, journal_of(self.events, len(archive)))
        snapshot = snapshot_of(builder, found=self.newest - pick((0, 0, 0, 0, 1)), epoch=epoch)
        spec = self.memory.ledger.run_state.spec
        run = dataclasses.replace(spec, bound=builder.bound, steps=max(builder.steps, builder.version))
        if self.both(lambda ledger: ledger.rebuild(run, snapshot)) is None:
            self.epochs.append(epoch)
            self.events = archive
