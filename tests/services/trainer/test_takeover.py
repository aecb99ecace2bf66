"""Tests that a batch with groups that cannot be trained is given back, and the trainer holds the run."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import Reason, Refused, TetherError, WeightError
from protocol.lifecycle import GroupState
from protocol.topics import WEIGHTS, Role
from services.bus.broadcast import Broadcaster
from services.runtime import writing
from services.runtime.process import Process
from services.runtime.writing import StoppedWaiting
from services.trainer.checkpointing import Checkpointer
from services.trainer.model_runner import ModelRunner
from services.trainer.open_run import ModelVersion, OpenRun
from services.trainer.takeover import reclaim, take_over
from tests.contracts.ledger_rig import Driver, MemoryRig
from tests.integration.loop import settings_for
from tests.small_disks import small_disk
from trainer.backends.scripted import ScriptedBackend
from trainer.config import TrainerConfig
from trainer.roles.models import RankModels
from trainer.storage.checkpoints import Checkpoints
from trainer.storage.spool import Spool
from trainer.storage.stored import MissingRecords
from trainer.weights.files import disk_sender, http_sender

Held = tuple[OpenRun, ModelRunner, Driver, ModelVersion]


@asynccontextmanager
async def holding(tmp_path: Path, *overrides: str) -> AsyncIterator[Held]:
    """A trainer at version 0 that has taken a batch of three groups, and publishes on disk."""
    settings = settings_for(tmp_path, "stragglers.toml", *overrides)
    driver = await Driver(MemoryRig()).begin(B=3)
    ledger: Any = driver.ledger
    process = Process(Role.TRAINER, settings, ledger, "trainer")
    models = RankModels(ScriptedBackend(trainer=TrainerConfig()))
    with ThreadPoolExecutor(1) as thread, closing(Spool(tmp_path / "spool.sqlite")) as spool:
        make = http_sender if settings.weights.url else disk_sender
        runner = ModelRunner(models, make(settings.weights, tmp_path), thread, engine_dtype="float32")
        async with Broadcaster(WEIGHTS, run="r", incarnation="trainer", config=settings.bus) as broadcaster:
            checkpoints = Checkpoints(settings.run_dir / "checkpoints", keep=2)
            run = OpenRun(process, "e1", spool, None, checkpoints, None, broadcaster)  # type: ignore[arg-type]
            await driver.scored(3)
            manifest = await runner.publish("e1", 0)
            yield run, runner, driver, ModelVersion(0, manifest.digest, manifest)
        await runner.close()


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Held]:
    async with holding(tmp_path) as made:
        yield made


async def test_only_the_groups_that_cannot_be_trained_are_generated_again(held: Held) -> None:
    run, runner, driver, model = held
    batch = (await driver.ledger.take("e1")).groups
    lost = {(group.group, group.token): f"group {group.group}: damaged" for group in batch[:2]}
    again = await reclaim(run, runner, model, MissingRecords(lost))
    assert run.epoch == again.published.epoch != "e1"
    assert (again.version, again.digest, again.published.digest) == (0, model.digest, model.digest)
    assert (await driver.ledger.head()).published == 0
    states = (await driver.ledger.status()).states
    assert (states[GroupState.WAITING], states[GroupState.SCORED], states[GroupState.TAKEN]) == (2, 1, 0)
    await driver.scored(2)  # engines that serve the version under the epoch before get leases
    assert {group.group for group in (await driver.ledger.take(run.epoch)).groups} == {
        group.group for group in batch
    }


async def test_a_fenced_trainer_gives_nothing_back(held: Held) -> None:
    run, runner, driver, model = held
    batch = (await driver.ledger.take("e1")).groups
    before = await driver.ledger.claim("e2")
    missing = MissingRecords({(batch[0].group, batch[0].token): "group 0: damaged"})
    with pytest.raises(Refused) as refused:
        await reclaim(run, runner, model, missing)
    assert refused.value.reason is Reason.STALE_EPOCH
    assert (run.epoch, await driver.ledger.status()) == ("e1", before)


async def test_weights_that_are_not_the_committed_ones_end_the_trainer(held: Held) -> None:
    run, runner, driver, model = held
    batch = (await driver.ledger.take("e1")).groups
    runner.executor.models.policy._weight.fill_(3)  # type: ignore[attr-defined]
    with pytest.raises(TetherError, match="not what was committed"):
        await reclaim(
            run, runner, model, MissingRecords({(batch[0].group, batch[0].token): "group 0: damaged"})
        )


async def test_trainer_that_never_publishes_starts_again_to_have_the_initial_weights(held: Held) -> None:
    run, runner, driver, model = held
    batch = (await driver.ledger.take("e1")).groups
    trainer = replace(run.process.settings.trainer, publish_every=0)
    run.process.settings = replace(run.process.settings, trainer=trainer)
    with pytest.raises(TetherError, match="to publish the initial weights"):
        await reclaim(
            run, runner, model, MissingRecords({(batch[0].group, batch[0].token): "group 0: damaged"})
        )
    assert (await driver.ledger.head()).published == -1


async def test_exports_of_versions_that_the_run_has_left_are_removed(held: Held) -> None:
    run, runner, *_ = held
    exports = run.process.settings.run_dir / "exports"
    for name in ("step_00000000", "step_00000003", "adapter_step_00000003", "best_step_00000003-0f"):
        (exports / name).mkdir(parents=True)
    run.epoch = "e2"
    async with Checkpointer(run, runner) as checkpointer:
        model = await take_over(run, runner, checkpointer)
    assert model.version == 0
    assert sorted(path.name for path in exports.iterdir()) == ["best_step_00000003-0f", "step_00000000"]


async def waits_of_trainer(driver: Driver) -> list[str]:
    """Return the waits of the trainer, once the ledger has them."""
    while not (peers := await driver.ledger.peers()):  # noqa: ASYNC110 (the ledger sends no notice)
        await asyncio.sleep(0.01)
    return list(peers[0].info["waits"])


def fill(disk: Path) -> Path:
    """Leave no room on a disk, and return the file to remove."""
    with (disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(1 << 12))
    return disk / "ballast"


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_a_version_waits_for_room_on_its_disk_until_the_process_stops(
    tmp_path: Path, is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "RETRY_S", 0.01)
    with small_disk(tmp_path / "disk", 256) as disk:
        words = "weights.transport=disk", f"weights.directory={disk}"
        async with holding(tmp_path, *words) as (run, runner, driver, model), asyncio.timeout(60):
            ballast = fill(disk)

            async def end_wait() -> list[str]:
                waits = await waits_of_trainer(driver)
                if is_stopped:
                    run.process.stop.set()
                else:
                    ballast.unlink()
                return waits

            async with asyncio.TaskGroup() as tasks:
                waits = tasks.create_task(end_wait())
                with pytest.raises(StoppedWaiting) if is_stopped else nullcontext():
                    again = await reclaim(run, runner, model, MissingRecords({}))
                    assert again.digest == model.digest
            names = {path.name for path in disk.iterdir()}
        assert waits.result() == [f"room: the disk of {disk} is full"]
        assert names == {"v00000000-e1", "ballast" if is_stopped else f"v00000000-{run.epoch}"}


async def test_a_trainer_that_is_fenced_while_it_waits_for_room_ends_its_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "RETRY_S", 0.01)
    with small_disk(tmp_path / "disk", 256) as disk:
        words = "weights.transport=disk", f"weights.directory={disk}"
        async with holding(tmp_path, *words) as (run, runner, driver, model), asyncio.timeout(60):
            fill(disk)

            async def fence() -> None:
                await waits_of_trainer(driver)
                await driver.ledger.claim("e2")

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fence())
                with pytest.raises(Refused) as refused:
                    await reclaim(run, runner, model, MissingRecords({}))
            assert refused.value.reason is Reason.STALE_EPOCH
            assert run.process.waits == []
            assert {path.name for path in disk.iterdir()} == {"v00000000-e1", "ballast"}


async def test_a_full_disk_of_copies_is_named_by_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "RETRY_S", 0.01)
    with small_disk(tmp_path / "disk", 256) as disk:
        words = "weights.transport=http", f"weights.url=file://{disk}/copies/"
        async with holding(tmp_path, *words) as (run, runner, driver, model), asyncio.timeout(60):
            ballast = fill(disk)
            async with asyncio.TaskGroup() as tasks:
                again = tasks.create_task(reclaim(run, runner, model, MissingRecords({})))
                waits = await waits_of_trainer(driver)
                ballast.unlink()
            assert waits == [f"room: the disk of file://{disk}/copies is full"]
            assert again.result().digest == model.digest


async def test_shared_memory_without_room_ends_the_trainer(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 256) as disk:
        words = "weights.transport=shm", f"weights.directory={disk}"
        async with holding(tmp_path, *words) as (run, runner, _, model):
            fill(disk)
            with pytest.raises(WeightError):
                await reclaim(run, runner, model, MissingRecords({}))
