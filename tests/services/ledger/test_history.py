"""What the event log tells of steps and groups, on histories with crashes, rewinds, drops and lost writes."""

from typing import Any

import pytest

from protocol.errors import SettingsError
from protocol.staleness import Policy
from services.ledger.event_log.reader import committed_steps
from services.ledger.event_log.trace import render_trace, trace
from tests.contracts.ledger_rig import Driver, MemoryRig

Log = list[dict[str, Any]]


async def recorded(driver: Driver) -> Log:
    return [dict(event) for event in await driver.ledger.events(0, 10_000)]


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


async def test_steps_are_those_of_the_ledger_after_a_rewind() -> None:
    driver, log = await rewound()
    steps = committed_steps(log, range(0, 10))
    assert [logged.record for logged in steps.values()] == list(await driver.ledger.step_records(0))
    assert [logged.record.epoch for logged in steps.values()] == ["e1", "e2"]
    assert all(
        logged.trained == {group.group: group.counts for group in logged.record.groups}
        for logged in steps.values()
    )
    assert list(committed_steps(log, range(1, 2))) == [1]


async def test_a_rewound_group_lives_twice() -> None:
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


async def test_a_dropped_group_tells_why_and_what_was_wasted() -> None:
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


async def test_what_only_the_journal_knows_is_told_by_the_rebuild() -> None:
    _, log = await rewound()
    commit = next(event for event in reversed(log) if event["event"] == "commit")
    lost = [
        event
        for event in log
        if event["seq"] <= next(e["seq"] for e in log if e["event"] == "resume" and not e["continued"])
    ]
    accepted = [
        {"group": group.group, "token": group.token, "version": group.version, "deadline": group.deadline, "bound": group.max_staleness,
         "counts": {str(version): n for version, n in group.counts.items()}}
        for group in reversed(committed_steps(log, range(1, 2))[1].record.groups)
    ]  # fmt: skip
    told = {
        "event": "commit",
        "epoch": "e2",
        "step": 1,
        "digest": commit["digest"],
        "groups": commit["groups"],
        "accepted": accepted,
    }
    rebuild = {
        "seq": 900,
        "time_ms": 5,
        "event": "rebuild",
        "epoch": "e3",
        "after": lost[-1]["seq"],
        "told": [told],
        "waiting": [4],
    }
    steps = committed_steps([*lost, rebuild], range(0, 9))
    assert steps == committed_steps(log, range(0, 9))
    moments = trace([*lost, rebuild], 4)
    assert (moments[-1].event, str(moments[-1].state), moments[-1].sequence) == ("rebuild", "waiting", 900)
    assert [moment.event for moment in trace([*lost, rebuild], 2)][-2:] == ["accept", "commit"]


async def test_a_log_with_a_hole_is_refused() -> None:
    _, log = await rewound()
    with pytest.raises(SettingsError, match=r"event \d+ \(commit\) does not fit"):
        committed_steps([event for event in log if event["event"] != "accept"], range(0, 9))
