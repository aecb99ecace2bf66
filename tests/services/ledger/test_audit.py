import asyncio
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import Reason, TetherError
from protocol.staleness import Policy
from services.ledger.event_log.archiver import FILE, Archiver, last_sequence
from services.ledger.event_log.hash_chain import append
from services.ledger.verify.verifier import verify, verify_events
from tests.contracts.ledger_rig import Driver, MemoryRig

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


async def test_archive_and_verify_a_file(driver: Driver, tmp_path: Path) -> None:
    await driver.begin(B=1)
    archiver = Archiver(driver.ledger, tmp_path, batch=3)
    await driver.step(1)
    await archiver.archive_all()
    await driver.step(1)
    assert await archiver.archive() == 3
    await Archiver(driver.ledger, tmp_path).archive_all()
    assert list(await driver.ledger.events(0, 10)) == []
    result = verify(tmp_path / FILE)
    assert (result.violations, result.trained) == ([], 2)
    assert last_sequence(tmp_path / FILE) == (await driver.ledger.status()).sequence


async def test_archive_cuts_off_a_torn_line(driver: Driver, tmp_path: Path) -> None:
    await driver.begin(B=1)
    path = tmp_path / FILE
    events = await driver.ledger.events(0, 100)
    append(path, events[:3])
    with path.open("ab") as file:
        file.write(json.dumps(events[3]).encode()[:20])
    assert verify(path).violations == []
    assert await Archiver(driver.ledger, tmp_path).archive() == len(events) - 3
    assert verify(path).violations == []
    assert [json.loads(line)["seq"] for line in path.read_bytes().splitlines()] == list(
        range(1, len(events) + 1)
    )
    path.write_bytes(b'{"seq": 1')
    assert last_sequence(path) == 0
    assert path.read_bytes() == b""


async def test_archive_refuses_a_gap_and_a_ledger_that_forgot(driver: Driver, tmp_path: Path) -> None:
    await driver.begin(B=1)
    path = tmp_path / FILE
    path.write_text('{"seq": 1000}\n')
    with pytest.raises(TetherError, match="lost acknowledged writes"):
        await Archiver(driver.ledger, tmp_path).archive()
    await driver.ledger.archived(3)
    path.write_text('{"seq": 1}\n')
    with pytest.raises(TetherError, match="events are missing"):
        await Archiver(driver.ledger, tmp_path).archive()
    path.write_text("what\n")
    with pytest.raises(TetherError, match="not an event"):
        await Archiver(driver.ledger, tmp_path).archive()


async def test_archive_all_empties_the_log(driver: Driver, tmp_path: Path) -> None:
    await driver.begin(B=1)
    await driver.step(1)
    await Archiver(driver.ledger, tmp_path, batch=2).archive_all()
    assert list(await driver.ledger.events(0, 10)) == []
    assert verify(tmp_path / FILE).trained == 1
    await driver.refused(Reason.WRONG_STATE, driver.ledger.archived(10_000))


async def test_two_archivers_of_a_run_double_nothing(tmp_path: Path) -> None:
    """As when an ingest that is ending, or was stopped for a while, meets its successor."""
    driver = await Driver(MemoryRig()).begin(E=1, B=1)
    archivers = [Archiver(driver.ledger, tmp_path, batch=3) for _ in range(2)]
    for _ in range(40):
        await driver.step(1)
        async with asyncio.TaskGroup() as tasks:
            for archiver in archivers:
                tasks.create_task(archiver.archive_all())
    assert last_sequence(tmp_path / FILE) == (await driver.ledger.status()).sequence
    assert verify(tmp_path / FILE).violations == []


async def test_an_archiver_goes_on_where_another_has_ended(tmp_path: Path) -> None:
    driver = await Driver(MemoryRig()).begin(E=1, B=1)
    first, second = (Archiver(driver.ledger, tmp_path) for _ in range(2))
    for archiver in (first, second, first):
        await driver.step(1)
        await archiver.archive_all()
    assert verify(tmp_path / FILE).violations == []
