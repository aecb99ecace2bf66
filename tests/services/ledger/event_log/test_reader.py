"""Steps and groups read from the event log, on histories with crashes, rewinds, drops and lost writes."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.staleness import Policy
from services.ledger.event_log.events import (
    AcceptEvent,
    CommitEvent,
    LedgerEvent,
    RebuildEvent,
    ResumeEvent,
    decode_fields,
)
from services.ledger.event_log.reader import committed_steps, read_events
from services.ledger.event_log.trace import render_trace, trace
from services.ledger.interface import JournalCommit
from tests.contracts.ledger_rebuild import accept_of
from tests.contracts.ledger_rig import Driver, MemoryRig

Log = list[LedgerEvent]


async def recorded(driver: Driver) -> Log:
    return [decode_fields(event) for event in await driver.ledger.events(0, 10_000)]


async def rewound() -> tuple[Driver, Log]:
    """Two steps, a crash in the third, and a rewind to version 1 before other groups make the second step."""
    driver = await Driver(MemoryRig()).begin(E=1, B=2, policy=Policy.WAIT)
    await driver.step(2)
    await driver.step(2)
    await driver.scored(2)
    await driver.ledger.take("e1")
    await driver.ledger.claim("e2")
    assert not await driver.ledger.resume("e2", 1, 100)
    await driver.ledger.applied("eng", "e2", 1)
    await driver.step(2, "e2")
    return driver, await recorded(driver)


async def test_committed_steps_after_a_rewind_are_those_of_the_ledger() -> None:
    driver, log = await rewound()
    steps = committed_steps(log, range(0, 10))
    assert [logged.record for logged in steps.values()] == list(await driver.ledger.step_records(0))
    assert [logged.record.epoch for logged in steps.values()] == ["e1", "e2"]
    assert all(
        logged.trained == {group.group: group.counts for group in logged.record.groups}
        for logged in steps.values()
    )
    assert list(committed_steps(log, range(1, 2))) == [1]


async def test_trace_of_a_rewound_group_has_both_lives() -> None:
    _, log = await rewound()
    moments = trace(log, 2)
    assert [moment.event for moment in moments] == [
        "lease",
        "accept",
        "take",
        "commit",
        "rewind",
        "lease",
        "accept",
        "take",
        "commit",
    ]
    assert [str(moment.state) for moment in moments[3:6]] == ["trained", "waiting", "leased"]
    assert moments[-1].facts == {"step": 1, "trained": {"1": 10}, "lag_max": 0}
    untaken = trace(log, 4)
    assert [moment.event for moment in untaken][:5] == ["lease", "accept", "take", "untake", "rewind"]


async def test_trace_of_a_dropped_group_has_reason_and_wasted_tokens() -> None:
    driver = await Driver(MemoryRig()).begin()
    lease = await driver.lease()
    await driver.ledger.release(lease.group, lease.token, "prompt")
    again = await driver.lease()
    await driver.reaped(again)
    await driver.ledger.drop(again.group, again.token, "reward", 12)
    moments = trace(await recorded(driver), lease.group)
    assert [moment.event for moment in moments] == ["lease", "release", "lease", "expire", "drop"]
    text = render_trace(lease.group, moments)
    assert text.startswith("group 0: dropped after 2 leases, ")
    assert "reason reward" in text.splitlines()[-1]
    assert "wasted_tokens 12" in text.splitlines()[-1]
    assert trace(await recorded(driver), 7) == []


async def test_a_rebuild_adds_what_only_the_journal_knew() -> None:
    _, log = await rewound()
    commit = [event for event in log if isinstance(event, CommitEvent)][-1]
    rewind = next(i for i, event in enumerate(log) if isinstance(event, ResumeEvent) and not event.continued)
    kept = log[: rewind + 1]
    batch = committed_steps(log, range(1, 2))[1].record.groups
    committed = JournalCommit(
        epoch="e2",
        step=1,
        digest=commit.digest,
        groups=commit.groups,
        accepted=[accept_of(group) for group in reversed(batch)],
    )
    rebuild = RebuildEvent(
        seq=900,
        time_ms=5,
        epoch="e3",
        after=kept[-1].seq,
        version=2,
        issued=6,
        trained=4,
        dropped=0,
        journal_events=[committed],
        waiting=[4],
    )
    steps = committed_steps([*kept, rebuild], range(0, 9))
    assert steps == committed_steps(log, range(0, 9))
    moments = trace([*kept, rebuild], 4)
    assert (moments[-1].event, str(moments[-1].state), moments[-1].time_ms) == ("rebuild", "waiting", 5)
    assert [moment.event for moment in trace([*kept, rebuild], 2)][-2:] == ["accept", "commit"]


async def test_committed_steps_refuse_a_log_with_a_hole() -> None:
    _, log = await rewound()
    with pytest.raises(SettingsError, match=r"event \d+ \(commit\) does not fit"):
        committed_steps([event for event in log if not isinstance(event, AcceptEvent)], range(0, 9))


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    opens, loops = tmp_path / "opens.jsonl", tmp_path / "loops.jsonl"
    opens.symlink_to("/proc/self/mem")  # can be opened, and has nothing at its first byte
    loops.symlink_to(loops)
    for path, reason in ((opens, "Input/output error"), (loops, "Too many levels")):
        with pytest.raises(SettingsError, match=f"no event log {path}: {reason}"):
            next(read_events(path))
