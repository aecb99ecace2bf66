"""The ledger on Redis does what the oracle in memory does, whatever is called in whatever order."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from protocol.errors import Refused
from protocol.lifecycle import GroupState
from protocol.staleness import Bound, Policy, holds, trainable_counts
from services.ledger.interface import Lease, Peer, Taken
from services.ledger.verify import verify_events
from tests.contracts.ledger_rig import MemoryRig, RedisRig, spec

HOUR_MS = 3_600_000
ENGINES = ("a", "b", "c")
REASONS = ("filter", "reward")


class Machine(RuleBasedStateMachine):
    """Drives both ledgers side by side; each call must give the same result or refusal, status and events."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.calls = 0
        self.epochs = ["e0"]
        self.leases: list[Lease] = []
        self.taken: Taken | None = None
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
        return expected

    @initialize(
        E=st.integers(0, 2), B=st.integers(1, 3), policy=st.sampled_from(Policy), prompts=st.sampled_from([None, 4, 12]),
        steps=st.sampled_from([2, 6, 50]), attempts=st.integers(1, 4), window=st.sampled_from([3, 64]),
    )  # fmt: skip
    def create(self, E: int, B: int, policy: Policy, prompts: int | None, steps: int, attempts: int, window: int) -> None:
        values = {"prompts": prompts, "max_attempts": attempts, "drop_window": window}
        self.spec = spec("x", E=E, B=B, policy=policy, steps=steps, **values)
        self.both(lambda ledger: ledger.create(self.spec))
        self.claim_and_resume(0, True)
        for engine in ENGINES[:2]:
            self.both(lambda ledger, engine=engine: ledger.applied(engine, self.epochs[-1], 0))

    @property
    def version(self) -> int:
        return self.memory.ledger.book.version

    def chosen(self, data: st.DataObject) -> Lease:
        return data.draw(st.sampled_from(self.leases[-8:]))

    @rule(engine=st.sampled_from(ENGINES), again=st.booleans())
    def lease(self, engine: str, again: bool) -> None:
        request = f"r{self.calls - again}"
        lease = self.both(lambda ledger: ledger.lease(request=request, engine=engine, holder="w", lease_ms=HOUR_MS))
        if isinstance(lease, Lease):
            self.leases.append(lease)

    @rule(engine=st.sampled_from(ENGINES))
    def lease_more(self, engine: str) -> None:
        self.lease(engine, False)
        self.lease(engine, False)

    @rule(engine=st.sampled_from(ENGINES), behind=st.integers(-1, 2), old=st.booleans())
    def applied(self, engine: str, behind: int, old: bool) -> None:
        epoch = self.epochs[-2 if old and len(self.epochs) > 1 else -1]
        self.both(lambda ledger: ledger.applied(engine, epoch, max(0, self.version - behind)))

    @rule()
    def all_apply(self) -> None:
        for engine in ENGINES:
            self.both(lambda ledger, engine=engine: ledger.applied(engine, self.epochs[-1], self.version))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        lease = self.chosen(data)
        if self.memory.ledger.book.groups.get(lease.group) is not None:
            self.memory.expire(lease.group)
            self.redis.expire(lease.group)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        lease = self.chosen(data)
        self.both(lambda ledger: ledger.extend(lease.group, lease.token, HOUR_MS))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = self.chosen(data)
        self.both(lambda ledger: ledger.release(lease.group, lease.token, "tired"))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), fresh=st.integers(0, 5), old=st.integers(0, 5))
    def accept(self, data: st.DataObject, fresh: int, old: int) -> None:
        lease = self.chosen(data)
        counts = {self.version: fresh}
        counts[lease.version] = counts.get(lease.version, 0) + old
        self.both(lambda ledger: ledger.accept(lease.group, lease.token, counts))

    @rule()
    def accept_all(self) -> None:
        for group in self.memory.ledger.book.live():
            counts = {group.version: 3}
            self.both(lambda ledger, group=group, counts=counts: ledger.accept(group.group, group.token, counts))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def lost(self, data: st.DataObject) -> None:
        lease = self.chosen(data)
        self.both(lambda ledger: ledger.lost(lease.group, lease.token))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), reason=st.sampled_from(REASONS), wasted=st.integers(0, 9))
    def drop(self, data: st.DataObject, reason: str, wasted: int) -> None:
        lease = self.chosen(data)
        self.both(lambda ledger: ledger.drop(lease.group, lease.token, reason, wasted))

    @rule(old=st.booleans())
    def take(self, old: bool) -> None:
        epoch = self.epochs[-2 if old and len(self.epochs) > 1 else -1]
        taken = self.both(lambda ledger: ledger.take(epoch))
        if isinstance(taken, Taken):
            self.taken = taken

    @precondition(lambda self: self.taken is not None)
    @rule(spoil=st.sampled_from(["", "", "", "", "all", "over", "fewer", "epoch"]))
    def commit(self, spoil: str) -> None:
        taken = self.taken
        assert taken is not None
        trained = {group.group: trainable_counts(taken.step, group.counts, group.max_staleness) for group in taken.groups}
        if spoil == "all":
            trained = {group.group: dict(group.counts) for group in taken.groups}
        elif spoil == "over":
            trained[taken.groups[0].group] = {taken.step: 1000}
        elif spoil == "fewer":
            del trained[taken.groups[0].group]
        epoch = "e?" if spoil == "epoch" else self.epochs[-1]
        name = f"{taken.step}-{self.calls}".encode()
        self.both(lambda ledger: ledger.commit(epoch, taken.step, trained, digest=taken.step + 1, report=name, manifest=name))

    @rule(back=st.integers(0, 3), same=st.booleans())
    def claim_and_resume(self, back: int, same: bool) -> None:
        epoch = f"e{len(self.epochs)}"
        self.both(lambda ledger: ledger.claim(epoch))
        self.epochs.append(epoch)
        version = max(0, self.version - back)
        for _ in range(2):
            self.both(lambda ledger: ledger.resume(epoch, version, version if same else 999))

    @rule()
    def claim_only(self) -> None:
        epoch = f"e{len(self.epochs)}"
        self.both(lambda ledger: ledger.claim(epoch))
        self.epochs.append(epoch)

    @rule(back=st.integers(-1, 2))
    def checkpointed(self, back: int) -> None:
        self.both(lambda ledger: ledger.checkpointed(max(0, self.version - back)))

    @rule(E=st.none() | st.integers(0, 3), B=st.none() | st.integers(1, 4), policy=st.none() | st.sampled_from(Policy))
    def set_bound(self, E: int | None, B: int | None, policy: Policy | None) -> None:
        found = self.both(lambda ledger: ledger.set_bound(max_staleness=E, groups_per_step=B, policy=policy))
        assert found is None or isinstance(found, Bound)

    @rule(on=st.booleans())
    def drain(self, on: bool) -> None:
        self.both(lambda ledger: ledger.drain(on))
        self.both(lambda ledger: ledger.drain(False))

    @rule(steps=st.integers(1, 8))
    def create_again(self, steps: int) -> None:
        again = spec("x", steps=steps, prompts=self.spec.prompts)
        self.both(lambda ledger: ledger.create(again))

    @rule(content=st.binary(max_size=3), behind=st.integers(0, 1))
    def publish(self, content: bytes, behind: int) -> None:
        self.both(lambda ledger: ledger.publish(self.epochs[-1], content, self.version - behind))

    @rule(name=st.sampled_from(ENGINES))
    def register(self, name: str) -> None:
        self.both(lambda ledger: ledger.register(Peer("rollout", name, {"n": self.calls}), HOUR_MS))
        self.both(lambda ledger: ledger.peers())

    @rule(name=st.sampled_from(ENGINES))
    def unregister(self, name: str) -> None:
        self.both(lambda ledger: ledger.unregister(name))

    @rule()
    def archived(self) -> None:
        self.both(lambda ledger: ledger.archived(len(self.events)))

    @invariant()
    def equal(self) -> None:
        if self.calls == 0:
            return
        status = self.both(lambda ledger: ledger.status())
        assert status.issued == status.trained + status.dropped + status.active
        events = [self.runner.run(rig.ledger.events(len(self.events), 10_000)) for rig in (self.memory, self.redis)]
        plain = [[{key: value for key, value in event.items() if key != "time_ms"} for event in log] for log in events]
        assert plain[0] == plain[1]
        self.events += plain[0]
        self.both(lambda ledger: ledger.step_records(0))
        self.both(lambda ledger: ledger.reports(0))
        self.both(lambda ledger: ledger.manifest())

    @invariant()
    def rule_f_holds(self) -> None:
        if self.calls == 0:
            return
        book = self.memory.ledger.book
        if book.bound.policy is not Policy.MASK:
            assert holds(book.places(), book.next_step(), book.bound)
            if book.running is not None:
                taken = [group.deadline for group in book.of(GroupState.TAKEN)]
                assert holds([*book.places(), *taken], book.version, book.bound)

    def teardown(self) -> None:
        try:
            assert verify_events(self.events).violations == []
        finally:
            self.runner.run(self.redis.close())
            self.runner.close()


def run(url: str, examples: int) -> None:
    checks = settings(
        max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
    )
    run_state_machine_as_test(type("ServerMachine", (Machine,), {"url": url}), settings=checks)  # type: ignore[no-untyped-call]


def test_valkey_follows_the_oracle(valkey_url: str) -> None:
    run(valkey_url, 60)


def test_redis_follows_the_oracle(redis_url: str) -> None:
    run(redis_url, 15)
