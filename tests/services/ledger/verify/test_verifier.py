"""`verify` proves a good log, and finds what is wrong with a corrupted one."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from protocol.staleness import Policy
from tests.contracts.ledger_rig import Driver, MemoryRig
from tests.services.ledger.verify.logs import verify_events

Log = list[dict[str, Any]]


async def recorded() -> tuple[Driver, Log]:
    """A run with a re-lease, a drop, a crash and a rewind, and its events."""
    driver = await Driver(MemoryRig()).begin(E=1, B=2, policy=Policy.WAIT)
    ledger = driver.ledger
    await driver.scored(1)
    await driver.step(2)
    expired = await driver.lease()
    await driver.reaped(expired)
    again = await driver.lease()
    await ledger.accept(again.group, again.token, {1: 4})
    dropped = await driver.lease()
    await ledger.drop(dropped.group, dropped.token, "filter", 3)
    await driver.scored(1)
    await ledger.take("e1")
    await ledger.claim("e2")
    assert await ledger.resume("e2", 1, 100)
    await driver.commit(await ledger.take("e2"), "e2")
    await ledger.claim("e3")
    assert not await ledger.resume("e3", 1, 100)
    await ledger.applied("eng", "e3", 1)
    await driver.step(2, "e3")
    await driver.step(2, "e3")
    return driver, [dict(event) for event in await ledger.events(0, 10_000)]


async def test_a_good_log_is_proven() -> None:
    driver, log = await recorded()
    result = verify_events(log)
    status = await driver.ledger.status()
    assert result.violations == []
    assert result.ok
    assert (result.issued, result.trained, result.dropped, result.active) == (
        status.issued,
        status.trained,
        status.dropped,
        status.active,
    )
    assert (result.steps, result.max_lag, result.bound) == (3, 1, 1)


def find(log: Log, kind: str, n: int = 0) -> dict[str, Any]:
    return [event for event in log if event["event"] == kind][n]


def renumbered(log: Log) -> None:
    for seq, event in enumerate(log, 1):
        event["seq"] = seq


def double_commit(log: Log) -> None:
    last = find(log, "commit", -1)
    log.insert(log.index(last) + 1, copy.deepcopy(last))
    renumbered(log)


def edit_count(log: Log) -> None:
    groups = find(log, "commit", -1)["groups"]
    group = next(iter(groups))
    groups[group] = {version: n + 1 for version, n in groups[group].items()}


def edit_issued(log: Log) -> None:
    find(log, "commit", -1)["issued"] += 1


def over_the_bound(log: Log) -> None:
    """Tokens of lag E + 1 that were accepted and trained."""
    commit = find(log, "commit", -1)
    group = next(iter(commit["groups"]))
    commit["groups"][group] = {str(commit["step"] - 2): 1}
    accept = [event for event in log if event["event"] == "accept" and event["group"] == int(group)][-1]
    accept["counts"] = {str(commit["step"] - 2): 1}


def vanish(log: Log) -> None:
    """Every event of one group, with the numbers closed up over them."""
    log[:] = [event for event in log if event.get("group") != 2]
    renumbered(log)


def gap(log: Log) -> None:
    del log[len(log) // 2]


def forge_token(log: Log) -> None:
    find(log, "accept", -1)["token"] = "forged"


def forge_deadline(log: Log) -> None:
    find(log, "lease", -1)["deadline"] += 1


def skip_version(log: Log) -> None:
    find(log, "commit", 1)["version"] += 1


def stale_trainer(log: Log) -> None:
    find(log, "commit", -1)["epoch"] = "e1"


def crowd(log: Log) -> None:
    """Leases under a smaller B than the one in force."""
    find(log, "create")["groups_per_step"] = 1
    for event in log:
        if event["event"] == "lease":
            event["groups_per_step"] = 1


def nonsense(log: Log) -> None:
    find(log, "take", 0)["groups"] = 7


def no_number(log: Log) -> None:
    """A value that cannot even be compared or hashed where a number belongs."""
    find(log, "commit", -1)["step"] = [1]


@pytest.mark.parametrize(
    ("corrupt", "says"),
    [
        (double_commit, "committed"),
        (edit_count, "more tokens"),
        (edit_issued, "issued"),
        (over_the_bound, "over the bound"),
        (vanish, "group 2"),
        (gap, "a gap"),
        (forge_token, "token forged"),
        (forge_deadline, "deadline"),
        (skip_version, "does not follow"),
        (stale_trainer, "epoch e1 acts"),
        (crowd, "rule F"),
        (nonsense, "malformed"),
        (no_number, "Expected `int`, got `array` - at `$.step`"),
    ],
)
async def test_a_corrupted_log_is_found_out(corrupt: Callable[[Log], None], says: str) -> None:
    _, log = await recorded()
    corrupt(log)
    result = verify_events(log)
    assert not result.ok
    assert any(says in violation for violation in result.violations), result.violations
    assert all(violation.startswith(("seq ", "end")) for violation in result.violations)
