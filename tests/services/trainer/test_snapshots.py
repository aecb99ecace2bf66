"""Tests which versions the trainer writes for evaluation, and how many it keeps."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from protocol.topics import Role
from services.evaluation.service import read_snapshots
from services.run_record.evaluations import SNAPSHOTS, Evaluation, append_evaluation
from services.runtime.process import Process
from services.settings.load import load_settings
from services.trainer.model_runner import ModelRunner
from services.trainer.open_run import OpenRun
from services.trainer.snapshots import Snapshots
from trainer.backends.scripted import ScriptedBackend
from trainer.config import TrainerConfig, WeightConfig
from trainer.roles.models import RankModels
from trainer.weights.files import disk_sender


class Rig:
    """A trainer of the scripted backend, with what its snapshots need of it."""

    def __init__(self, run_dir: Path, every: int, thread: ThreadPoolExecutor) -> None:
        self.run_dir = run_dir
        settings = load_settings(
            None, [f"run.dir={json.dumps(str(run_dir))}", f"eval.every={every}"], environ={}
        )
        nothing: Any = None
        self.run = OpenRun(
            Process(Role.TRAINER, settings, nothing, "trainer"), "e1", *[nothing] * 5
        )  # no ledger, files and bus: snapshots use none
        self.backend = ScriptedBackend(trainer=TrainerConfig())
        sender = disk_sender(WeightConfig(directory=str(run_dir / "weights")), run_dir)
        self.runner = ModelRunner(RankModels(self.backend), sender, thread, engine_dtype="float32")

    async def publish(self, version: int, epoch: str = "e1") -> tuple[int, int]:
        """Make and publish a version, whose weights are its number; returns it and its digest."""
        self.backend._weight.fill_(version)
        self.run.epoch = epoch
        return version, (await self.runner.publish(epoch, version)).digest

    async def make(self, *versions: int, last: int = -1) -> None:
        """Make versions, with a trainer that starts for them."""
        async with Snapshots(self.run, self.runner) as snapshots:
            for version in versions:
                await snapshots.take(*await self.publish(version), is_last=version == last)
                if snapshots._writing is not None:
                    await snapshots._writing

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / SNAPSHOTS).glob("*"))


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture
def rig(tmp_path: Path, thread: ThreadPoolExecutor) -> Rig:
    return Rig(tmp_path, 2, thread)


async def test_snapshots_are_those_of_due_versions_and_few_are_kept(rig: Rig) -> None:
    await rig.make(*range(10), last=9)
    assert rig.names() == ["v00000000-e1", "v00000008-e1", "v00000009-e1"]
    for snapshot in read_snapshots(rig.run_dir):
        assert snapshot.digest == (await rig.publish(snapshot.version))[1]


async def test_evaluation_that_is_off_writes_nothing(tmp_path: Path, thread: ThreadPoolExecutor) -> None:
    rig = Rig(tmp_path, 0, thread)
    async with Snapshots(rig.run, rig.runner) as snapshots:
        await snapshots.take_over(*await rig.publish(0), is_last=False)
        await snapshots.take(*await rig.publish(2), is_last=True)
    assert rig.names() == []


async def test_copy_that_differs_from_the_published_version_is_not_kept(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    async with Snapshots(rig.run, rig.runner) as snapshots:
        published = await rig.publish(2)
        rig.backend._weight.fill_(3)
        await snapshots.take(*published, is_last=False)
    assert rig.names() == []
    assert "snapshot.failed version=2" in caplog.text


async def test_full_disk_costs_the_snapshot_alone(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    (rig.run_dir / SNAPSHOTS).write_text("no folder")
    await rig.make(2)
    assert "snapshot.failed version=2" in caplog.text


async def test_take_over_removes_abandoned_versions_and_takes_its_own(rig: Rig) -> None:
    await rig.make(2, 4, 6)
    published = await rig.publish(4, "e2")  # rewound to 4
    async with Snapshots(rig.run, rig.runner) as snapshots:
        await snapshots.take_over(*published, is_last=False)
    assert rig.names() == ["v00000004-e2"]  # 2 was older than the newest two


async def test_take_over_takes_no_version_that_was_scored(rig: Rig) -> None:
    await rig.make(4)
    version, digest = await rig.publish(4, "e2")
    append_evaluation(rig.run_dir, Evaluation(version=version, digest=f"{digest:016x}", set="math"))
    async with Snapshots(rig.run, rig.runner) as snapshots:
        await snapshots.take_over(version, digest, is_last=True)
    assert rig.names() == ["v00000004-e1"]  # another set may still need it
