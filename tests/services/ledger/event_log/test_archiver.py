"""The archiver copies every event once, in order, whatever interrupts it."""

import asyncio
import json
from pathlib import Path

import pytest

from protocol.errors import Reason, SettingsError, TetherError
from services.ledger.event_log.archiver import FILE, Archiver, last_sequence
from services.ledger.event_log.hash_chain import append
from services.ledger.verify.verifier import verify
from tests.contracts.ledger_rig import Driver, MemoryRig


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
    append(path, [json.dumps(event).encode() for event in events[:3]])
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
    before = await driver.ledger.events(0, 100)
    for left, culprit in (
        ('{"seq": 1}\n', "ends at event 1, and the ledger begins at event 4"),
        ("", "ends at event 0, and the ledger begins at event 4"),
        ("what\n", "has a last line that is not an event"),
    ):
        path.write_text(left)
        with pytest.raises(SettingsError, match=rf"{path} {culprit}.*: .* Put the whole file back"):
            await Archiver(driver.ledger, tmp_path).archive()
        assert path.read_text() == left
    path.unlink()
    with pytest.raises(SettingsError, match=rf"{path} ends at event 0, .* was deleted"):
        await Archiver(driver.ledger, tmp_path).archive()
    assert (path.exists(), await driver.ledger.events(0, 100)) == (False, before)


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
