"""Contract of a rebuild, which `tests/services/ledger/test_contract.py` runs on each ledger."""

from collections.abc import Mapping, Sequence
from typing import Any

from protocol.errors import Reason
from protocol.staleness import Bound
from services.ledger.event_log.events import AcceptEvent, CommitEvent, LeaseEvent, RebuildEvent, decode_fields
from services.ledger.interface import (
    JournalAccept,
    JournalCommit,
    JournalEvent,
    RunSpec,
    Snapshot,
    TakenGroup,
)
from services.ledger_recovery.restore import SnapshotBuilder
from tests.contracts.ledger_rig import Driver, MemoryRig, spec
from tests.services.ledger.verify.logs import verify_events


def builder_of(
    events: Sequence[Mapping[str, Any]], journal_events: Sequence[JournalEvent] = ()
) -> SnapshotBuilder:
    """The run as an archive of `events` and a journal give it."""
    builder = SnapshotBuilder()
    for event in events:
        builder.apply(decode_fields(event))
    for journal_event in journal_events:
        builder.apply_journal(journal_event)
    return builder


def snapshot_of(builder: SnapshotBuilder, *, found: int, epoch: str = "r1") -> Snapshot:
    """What has to be written to a ledger that was found at event `found`."""
    return builder.snapshot(
        epoch=epoch, last_event=found, sequence=0, reports={step: b"report%d" % step for step in range(1000)}
    )


def restored(
    events: Sequence[Mapping[str, Any]], journal_events: Sequence[JournalEvent] = (), *, found: int
) -> Snapshot:
    """The snapshot of a run that an archive and a journal describe."""
    return snapshot_of(builder_of(events, journal_events), found=found)


def accept_of(group: TakenGroup) -> JournalAccept:
    """An accept as the journal has it."""
    return JournalAccept(
        group=group.group,
        token=group.token,
        version=group.version,
        deadline=group.deadline,
        bound=group.max_staleness,
        counts=dict(group.counts),
    )


def journal_of(events: Sequence[Mapping[str, Any]], start: int) -> list[JournalEvent]:
    """What a journal would have of the accepts and commits among `events[start:]`."""
    leases: dict[str, LeaseEvent] = {}
    accepts: dict[int, JournalAccept] = {}
    journal: list[JournalEvent] = []
    for number, event in enumerate(map(decode_fields, events)):
        new: list[JournalEvent] = []
        match event:
            case LeaseEvent():
                leases[event.token] = event
            case AcceptEvent():
                accepts[event.group] = accept_event(leases[event.token], event)
                new = [accepts[event.group]]
            case CommitEvent():
                accepted = [accepts[group] for group in event.groups]
                new = [
                    JournalCommit(
                        epoch=event.epoch,
                        step=event.step,
                        digest=event.digest,
                        groups=event.groups,
                        accepted=accepted,
                    )
                ]
            case RebuildEvent():
                new = event.journal_events
                for again in new:
                    nested = again.accepted if isinstance(again, JournalCommit) else [again]
                    accepts.update((accept.group, accept) for accept in nested)
        journal += new if number >= start else []
    return journal


def accept_event(lease: LeaseEvent, accept: AcceptEvent) -> JournalAccept:
    """An accept in the log as the journal has it, with what its lease says."""
    return JournalAccept(
        group=accept.group,
        token=accept.token,
        version=lease.version,
        deadline=lease.deadline,
        bound=lease.bound,
        counts=accept.counts,
    )


def small(driver: Driver, bound: Bound) -> RunSpec:
    return spec(driver.rig.run, E=bound.max_staleness, B=bound.groups_per_step, policy=bound.policy)


async def log(driver: Driver) -> list[Mapping[str, Any]]:
    return list(await driver.ledger.events(0, 10_000))


class RebuildContract:
    """A ledger that lost acknowledged writes, or everything."""

    async def test_a_rebuilt_run_goes_on_where_the_archive_ends(self, driver: Driver) -> None:
        await driver.begin(B=2)
        await driver.step(2)
        await driver.scored(2)
        leased = await driver.lease()
        taken = await driver.ledger.take("e1")
        before, events = await driver.ledger.status(), await log(driver)
        steps, reports = await driver.ledger.step_records(0), await driver.ledger.reports(0)
        snapshot = restored(events, found=before.sequence)
        run = small(driver, before.bound)
        await driver.ledger.rebuild(run, snapshot)
        await driver.ledger.rebuild(run, snapshot)
        status = await driver.ledger.status()
        assert (status.version, status.issued, status.trained, status.dropped) == (1, before.issued, 2, 0)
        assert {state.value: n for state, n in status.states.items()} == {
            "waiting": 1,
            "leased": 0,
            "scored": 2,
            "taken": 0,
        }
        assert (await driver.ledger.step_records(0), await driver.ledger.reports(0)) == (steps, reports)
        await driver.refused(Reason.STALE_EPOCH, driver.ledger.take("e1"))
        await driver.refused(Reason.STALE_EPOCH, driver.commit(taken))
        await driver.refused(Reason.NOT_HELD, driver.ledger.extend(leased.group, leased.token, 1000))
        await driver.refused(Reason.STALE_ENGINE, driver.lease())
        await driver.refused(Reason.STALE_EPOCH, driver.ledger.claim("e1"))
        await driver.ledger.claim("e2")
        await driver.refused(Reason.WRONG_STATE, driver.ledger.take("e2"))
        assert await driver.ledger.resume("e2", 1, 100)
        await driver.ledger.applied("eng", "e2", 1)
        assert (await driver.lease()).group == leased.group
        again = await driver.ledger.take("e2")
        assert [group.group for group in again.groups] == [group.group for group in taken.groups]
        await driver.commit(again, "e2")
        events += [event for event in await log(driver) if event["seq"] > snapshot.sequence]
        assert verify_events(events).violations == []

    async def test_groups_that_only_the_journal_knows_are_restored(self, driver: Driver) -> None:
        await driver.begin(E=2, B=1)
        await driver.step(1)
        archived = await log(driver)
        lease = await driver.lease()
        accepted = await driver.ledger.accept(lease.group, lease.token, {1: 4})
        assert await driver.ledger.accept(lease.group, lease.token, {1: 4}) == accepted
        assert accepted == TakenGroup(
            lease.group, lease.token, lease.deadline, lease.max_staleness, lease.version, {1: 4}
        )
        await driver.commit(await driver.ledger.take("e1"))
        between, late = await driver.lease(), await driver.lease()
        other = await driver.ledger.accept(late.group, late.token, {1: 2})
        counts = {lease.group: {1: 4}}
        journal_events = [
            JournalCommit(epoch="e1", step=1, digest="101", groups=counts, accepted=[accept_of(accepted)]),
            accept_of(accepted),
            accept_of(other),
        ]
        status = await driver.ledger.status()
        snapshot = restored(archived, journal_events, found=status.sequence)
        await driver.ledger.rebuild(small(driver, status.bound), snapshot)
        found = await driver.ledger.status()
        assert (found.version, found.trained, found.issued) == (status.version, status.trained, status.issued)
        assert {state.value: n for state, n in found.states.items()} == {
            "waiting": 1,
            "leased": 0,
            "scored": 1,
            "taken": 0,
        }
        await driver.ledger.claim("e2")
        assert await driver.ledger.resume("e2", 2, 101)
        await driver.ledger.applied("eng", "e2", 2)
        assert (await driver.lease()).group == between.group
        assert [group.group for group in (await driver.ledger.take("e2")).groups] == [late.group]
        events = archived + [event for event in await log(driver) if event["seq"] > snapshot.sequence]
        assert events[len(archived)]["event"] == "rebuild"
        assert verify_events(events).violations == []

    async def test_an_event_in_between_refuses_a_rebuild(self, driver: Driver) -> None:
        await driver.begin(B=1)
        await driver.step(1)
        status, events = await driver.ledger.status(), await log(driver)
        await driver.lease()
        for found in (status.sequence, -1):
            await driver.refused(
                Reason.WRONG_STATE,
                driver.ledger.rebuild(small(driver, status.bound), restored(events, found=found)),
            )

    async def test_an_empty_ledger_is_rebuilt(self, driver: Driver) -> None:
        lost = await Driver(MemoryRig()).begin(B=1)
        await lost.step(1)
        status, events = await lost.ledger.status(), await log(lost)
        await driver.ledger.rebuild(small(driver, status.bound), restored(events, found=-1))
        found = await driver.ledger.status()
        assert (found.version, found.trained, found.sequence) == (1, 1, status.sequence + 1)
        assert [event["seq"] for event in await log(driver)] == [found.sequence]

    async def test_a_trained_group_stays_trained_and_a_dropped_one_dropped(self, driver: Driver) -> None:
        await driver.begin(B=1, steps=20)
        await driver.step(1)
        dropped = await driver.lease()
        await driver.ledger.drop(dropped.group, dropped.token, "filter", 3)
        await driver.step(1)
        await driver.ledger.checkpointed(1)
        status, events = await driver.ledger.status(), await log(driver)
        await driver.ledger.rebuild(small(driver, status.bound), restored(events, found=status.sequence))
        found = await driver.ledger.status()
        assert (found.trained, found.dropped, found.wasted_tokens, found.dropped_by_reason) == (
            2,
            1,
            3,
            {"filter": 1},
        )
        assert [record.step for record in await driver.ledger.step_records(0)] == [1]
        await driver.ledger.claim("e2")
        await driver.refused(Reason.WRONG_STATE, driver.ledger.resume("e2", 0, 0))
        assert not await driver.ledger.resume("e2", 1, 100)
        assert (await driver.ledger.status()).trained == 1
        events += [event for event in await log(driver) if event["seq"] > status.sequence]
        assert verify_events(events).violations == []
