"""Tests the records of groups that the ledger refuses, with a real ledger and a real bus."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.messages import ScoredRollout
from protocol.topics import SCORED, Role
from services import ingest
from services.bus.sender import Declined, Sender
from services.ledger.embedded_server import EmbeddedServer
from services.ledger.interface import Ledger
from services.prepare import prepare
from services.runtime.process import open_process
from services.runtime.run_ledger import open_ledger
from tests.integration.loop import settings_for
from tests.trainer.groups import GroupSpec, SampleSpec, scored
from trainer.storage.spool import Spool


@asynccontextmanager
async def admitting(run_dir: Path) -> AsyncIterator[tuple[Ledger, Sender]]:
    """A run with steps of one group whose engine serves version 0, its ingest, and a reward worker."""
    settings = settings_for(run_dir, "stragglers.toml", "bound.groups_per_step=1")
    spec = await asyncio.to_thread(prepare, settings)
    server = EmbeddedServer(run_dir / "ledger")
    url = await server.start()
    settings = dataclasses.replace(settings, ledger=dataclasses.replace(settings.ledger, url=url))
    try:
        async with open_ledger(settings) as ledger, asyncio.timeout(60):
            await ledger.create(spec)
            await ledger.claim("e1")
            await ledger.resume("e1", 0, 7)
            await ledger.applied("engine", "e1", 0)
            async with open_process(Role.INGEST, settings, "ingest") as process, asyncio.TaskGroup() as tasks:
                tasks.create_task(ingest.serve(process), name="ingest")
                async with Sender(
                    SCORED,
                    run=settings.run.name,
                    incarnation="reward.0.x",
                    role=Role.REWARD,
                    config=settings.bus,
                    discover=lambda: ledger.endpoints(SCORED.name),
                ) as sender:
                    yield ledger, sender
                process.stop.set()
    finally:
        await server.stop()


def group(number: int, token: str) -> ScoredRollout:
    made = scored(GroupSpec(number, samples=[SampleSpec([5, 6], [0, 0]), SampleSpec([7], [0])]))
    return replace(made, rollout=replace(made.rollout, token=token))


async def test_a_refused_group_leaves_nothing_on_disk(tmp_path: Path) -> None:
    """A worker was away until its group was made by another, and then until a checkpoint covered that."""
    async with admitting(tmp_path) as (ledger, sender):
        lease = await ledger.lease(request="r", engine="engine", holder="engine", lease_ms=60_000)
        await sender.send(group(lease.group, lease.token))
        taken = await ledger.take("e1")
        counts = {one.group: dict(one.counts) for one in taken.groups}
        await ledger.commit("e1", 0, counts, digest=8, report=b"", manifest=b"")
        with pytest.raises(Declined, match="not_held"):
            await sender.send(group(lease.group, "late"))
        await ledger.checkpointed(1)
        with pytest.raises(Declined, match="duplicate: group 0 is finished and forgotten"):
            await sender.send(group(lease.group, "later"))
        with pytest.raises(Declined, match="duplicate"):  # its record may be trained on again
            await sender.send(group(lease.group, lease.token))
        with pytest.raises(Declined, match="unknown_group"):
            await sender.send(group(77, "none"))
    with closing(Spool(tmp_path / "spool.sqlite")) as spool, spool.transaction("read", "BEGIN") as found:
        assert found.execute("SELECT grp, token FROM records").fetchall() == [(0, lease.token)]
