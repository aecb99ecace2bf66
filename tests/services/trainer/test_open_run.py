"""Tests what a trainer reads of groups that were dropped, and of those that it cannot train."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from protocol.codec import encode_payload
from protocol.errors import ProtocolError, SettingsError
from protocol.staleness import Bound, Policy
from protocol.topics import Role
from services.ledger.interface import Peer, RunSpec, TakenBatch, TakenGroup
from services.runtime.process import Process
from services.trainer.open_run import OpenRun, open_spool, watch_spool_loop
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.integration.loop import settings_for
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from trainer.storage.spool import Spool


def open_run(spool: Spool) -> OpenRun:
    return OpenRun(
        process=None, epoch="e1", spool=spool, archive=None, checkpoints=None, steps=None, broadcaster=None
    )  # type: ignore[arg-type]


def test_lengths_are_of_the_groups_that_had_been_scored(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    samples = [SampleSpec([5, 6, 7], [0, 0, 0]), SampleSpec([5], [0])]
    spool.put_many([(4, "t", encode_payload(scored(GroupSpec(group=4, samples=samples))))])
    assert open_run(spool).response_lengths([3, 4]) == [[3, 1]]


def test_a_record_that_cannot_be_read_does_not_end_the_run(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    spool.put_many([(4, "t", b"noise")])
    assert open_run(spool).response_lengths([4]) == []


def taken(*groups: int) -> TakenBatch:
    return TakenBatch(0, tuple(TakenGroup(group, "t", 1, 1, 0, {0: 2}) for group in groups))


def test_only_the_groups_that_refuse_a_batch_are_given_up(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool.sqlite")
    wrong = SampleSpec([5, 6], [0, 0], logprobs=[-1.0, 2.64])
    groups = [GroupSpec(group=3), GroupSpec(group=4, samples=[wrong]), GroupSpec(group=6)]
    spool.put_many(
        [(spec.group, "t", encode_payload(scored(spec))) for spec in groups] + [(5, "t", b"noise")]
    )
    refused = ProtocolError("group 4: logprobs")
    causes = open_run(spool).find_unreadable(taken(3, 4, 5, 6), refused).causes
    assert list(causes) == [(4, "t"), (5, "t")]
    assert causes[4, "t"] == "group 4: logprobs of sample 0 has 2.64 for token 1, above 0"
    assert causes[5, "t"].startswith("group 5: not a message")
    with pytest.raises(ProtocolError, match="group 4: logprobs"):
        open_run(spool).find_unreadable(taken(3, 6), refused)


async def test_a_spool_that_the_ingest_does_not_write_to_ends_the_trainer(tmp_path: Path) -> None:
    ledger: Any = MemoryLedger()
    await ledger.create(RunSpec("r", "f", None, steps=9, bound=Bound(1, 1, Policy.WAIT)))
    process = Process(Role.TRAINER, settings_for(tmp_path, "stragglers.toml"), ledger, "trainer")
    Spool(tmp_path / "spool.sqlite").close()
    spool = await open_spool(process)

    async def registered(started: float, id: str) -> None:
        info = {"started": started, "spool": id}
        await ledger.register(Peer(Role.INGEST, f"ingest.{started}", info), ttl_ms=60_000)

    await registered(1.0, "of an ingest that has died")
    await registered(2.0, spool.id)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await watch_spool_loop(process, spool)
    await registered(3.0, "of another file")
    async with asyncio.timeout(60):
        with pytest.raises(SettingsError, match="is not the one that the ingest writes to"):
            await watch_spool_loop(process, spool)


async def test_a_trainer_waits_for_the_spool_and_makes_none(tmp_path: Path) -> None:
    process = Process(Role.TRAINER, settings_for(tmp_path, "stragglers.toml"), MemoryLedger(), "trainer")  # type: ignore[arg-type]
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        opening = tasks.create_task(open_spool(process))
        while not process.waits:  # noqa: ASYNC110 (a wait tells nobody)
            await asyncio.sleep(0.01)
        assert list(tmp_path.glob("spool*")) == []
        (tmp_path / "spool.sqlite").touch()  # as SQLite makes it, before the tables are in it
        Spool(tmp_path / "spool.sqlite").close()
    assert opening.result().get_many([]) == []
