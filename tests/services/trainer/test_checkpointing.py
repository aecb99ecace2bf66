"""Tests that checkpoints are written beside the steps: of which weights, one at a time, and what fails."""

import asyncio
import errno
import json
import os
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from protocol.errors import Reason, Refused, TetherError
from protocol.staleness import Bound, Policy
from protocol.topics import Role
from services.ledger.interface import RunSpec
from services.run_record.steps import StepLog
from services.runtime.process import Process
from services.runtime.run_copies import describe_copies
from services.settings.load import load_settings
from services.trainer import checkpointing
from services.trainer.checkpointing import Checkpointer
from services.trainer.model_runner import ModelRunner
from services.trainer.open_run import OpenRun
from services.trainer.uploads import HubModel, RemoteRun
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.hub_server import HubServer
from trainer.backends.scripted import PART, TENSOR, ScriptedBackend
from trainer.config import TrainerConfig, WeightConfig
from trainer.roles.models import RankModels
from trainer.storage.archive import Archive
from trainer.storage.checkpoints import Checkpoints
from trainer.storage.hf_export import Shards
from trainer.storage.host_state import HostState
from trainer.storage.spool import Spool
from trainer.weights.files import disk_sender


@dataclass(frozen=True)
class HeldState(HostState):
    """Is written only once it may be, to a disk that may be full."""

    may_write: threading.Event = field(default_factory=threading.Event)
    is_full: threading.Event = field(default_factory=threading.Event)

    def write(self, directory: Path) -> None:
        assert self.may_write.wait(60)
        if self.is_full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(directory)


class HeldBackend(ScriptedBackend):
    """Writes its state only once it may."""

    def __init__(self) -> None:
        super().__init__(trainer=TrainerConfig())
        self.may_write, self.is_full = threading.Event(), threading.Event()

    def copy_state(self) -> HostState:
        return HeldState(super().copy_state().tensors, may_write=self.may_write, is_full=self.is_full)


@dataclass
class Rig:
    """A trainer of the scripted backend, with a ledger in memory."""

    run: OpenRun
    runner: ModelRunner
    backend: HeldBackend
    ledger: MemoryLedger

    async def checkpoint(self, checkpointer: Checkpointer, version: int) -> None:
        """Make a version, whose weights are its number, and begin its checkpoint; then change the weights."""
        status = replace(await self.ledger.status(), version=version)
        self.backend._weight.fill_(version)
        await checkpointer.checkpoint(status, digest=version)
        self.backend._weight.fill_(-1)

    def versions(self) -> list[int]:
        return [checkpoint.version for checkpoint in self.run.checkpoints.complete()]

    def path(self, *parts: str) -> Path:
        return self.run.process.settings.run_dir.joinpath(*parts)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    settings = load_settings(None, [f"run.dir={json.dumps(str(tmp_path))}"], environ={})
    ledger: Any = MemoryLedger()
    await ledger.create(RunSpec("r", "f", None, steps=9, bound=Bound(1, 1, Policy.WAIT)))
    await ledger.claim("e1")
    (tmp_path / "metrics.jsonl").touch()
    backend, nobody = HeldBackend(), None
    with ThreadPoolExecutor(1) as thread, closing(Spool(tmp_path / "spool.sqlite")) as spool:
        run = OpenRun(
            Process(Role.TRAINER, settings, ledger, "trainer"), "e1", spool, Archive(tmp_path / "archive"),
            Checkpoints(tmp_path / "checkpoints", keep=5), StepLog(tmp_path / "metrics.jsonl"),
            nobody,  # type: ignore[arg-type]
        )  # fmt: skip
        sender = disk_sender(WeightConfig(directory=str(tmp_path / "weights")), tmp_path)
        runner = ModelRunner(RankModels(backend), sender, thread, engine_dtype="float32")
        yield Rig(run, runner, backend, ledger)
        backend.may_write.set()
        await runner.close()


async def test_checkpoint_and_export_are_of_the_version_although_the_model_changes(rig: Rig) -> None:
    async with Checkpointer(rig.run, rig.runner) as checkpointer:
        await rig.checkpoint(checkpointer, 0)
        assert rig.versions() == []
        rig.backend.may_write.set()
        await checkpointer.finish()
        await rig.checkpoint(checkpointer, 4)
    assert rig.versions() == [0, 4]
    part = load_file(rig.path("checkpoints", "step_00000004", PART))[TENSOR]
    export = load_file(rig.path("exports", "step_00000004", "model.safetensors"))[TENSOR]
    assert part.tolist() == export.tolist() == [4] * len(part)


async def test_next_checkpoint_waits_for_the_one_before(rig: Rig) -> None:
    async with Checkpointer(rig.run, rig.runner) as checkpointer, asyncio.TaskGroup() as tasks:
        await rig.checkpoint(checkpointer, 0)
        second = tasks.create_task(rig.checkpoint(checkpointer, 1))
        await asyncio.sleep(0)
        assert not rig.path("checkpoints", "step_00000001").exists()
        assert not second.done()
        rig.backend.may_write.set()
        await second
        assert rig.versions()[:1] == [0]
    assert rig.versions() == [0, 1]


async def test_checkpoint_that_cannot_be_written_is_reported_and_nothing_is_forgotten(rig: Rig) -> None:
    before = await rig.ledger.status()
    checkpointer = Checkpointer(rig.run, rig.runner)

    async def body() -> None:
        async with checkpointer:
            await rig.checkpoint(checkpointer, 1)
            checkpointer.check()  # nothing failed yet
            rig.path("checkpoints", "step_00000001").rmdir()
            rig.backend.may_write.set()

    with pytest.raises(TetherError, match="step_00000001"):
        await body()
    with pytest.raises(TetherError, match="step_00000001"):
        checkpointer.check()
    assert (rig.versions(), await rig.ledger.status()) == ([], before)
    assert not list(rig.path("exports").glob("step_*"))


@pytest.mark.parametrize("fails", ["parts", "rest"])
async def test_export_that_cannot_be_written_is_reported_and_its_checkpoint_is_complete(
    rig: Rig, fails: str
) -> None:
    if fails == "parts":
        rig.path("exports").touch()
    else:
        rig.path("exports").mkdir()
        rig.path("exports", "step_00000000.tmp").touch()
    rig.backend.may_write.set()

    async def body() -> None:
        async with Checkpointer(rig.run, rig.runner) as checkpointer:
            await rig.checkpoint(checkpointer, 0)

    with pytest.raises(TetherError, match=r"^export.*exports/\.?step_00000000"):
        await body()
    assert rig.versions() == [0]
    part = load_file(rig.path("checkpoints", "step_00000000", PART))[TENSOR]
    assert part.tolist() == [0] * len(part)


async def test_all_destinations_have_one_time_to_finish(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.backend.may_write.set()
    settings, may_copy, waits = rig.run.process.settings, threading.Event(), []
    copied_to = replace(settings.run, hub="some-org/mine", remote=f"file://{tmp_path}/remote")
    rig.run.process.settings = replace(settings, run=copied_to)
    for destination in (RemoteRun, HubModel):
        monkeypatch.setattr(destination, "copy", lambda to, job: may_copy.wait(60))
    monkeypatch.setattr(checkpointing, "FINISH_S", 0.2)

    def recorded(changed: threading.Condition) -> Callable[..., bool]:
        wait_for = changed.wait_for

        def record(is_so: Callable[[], bool], seconds: float | None = None) -> bool:
            waits.extend([] if seconds is None else [seconds])
            return wait_for(is_so, seconds)

        return record

    async with Checkpointer(rig.run, rig.runner) as checkpointer:
        for uploader in checkpointer._uploaders:
            monkeypatch.setattr(uploader._changed, "wait_for", recorded(uploader._changed))
        await rig.checkpoint(checkpointer, 0)
    first, second = waits
    assert second <= 0 < first  # the first has waited for all of it
    problems = list(describe_copies(rig.run.process.settings))
    assert ["not copied in" in problem for problem in problems] == [True, True]
    may_copy.set()


async def test_an_older_export_of_a_version_is_not_uploaded_when_the_new_one_fails(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.backend.may_write.set()
    settings = rig.run.process.settings
    rig.run.process.settings = replace(settings, run=replace(settings.run, hub="some-org/mine"))
    monkeypatch.setenv("HF_TOKEN", "hf_token")

    async def body() -> None:
        async with Checkpointer(rig.run, rig.runner) as checkpointer:
            await rig.checkpoint(checkpointer, 4)

    with HubServer(writers={"hf_token"}).serving() as hub:
        hub.use(monkeypatch, tmp_path / "cache")
        async with Checkpointer(rig.run, rig.runner) as checkpointer:
            await rig.checkpoint(checkpointer, 0)
        rig.path("exports", "step_00000000").rename(rig.path("exports", "step_00000004"))
        uploaded = hub.repository("model", "some-org/mine").branches["main"]
        rig.path("exports", "step_00000004.tmp").touch()
        with pytest.raises(TetherError, match="step_00000004"):
            await body()
        assert rig.versions() == [0, 4]
        async with Checkpointer(rig.run, rig.runner) as checkpointer:
            await checkpointer.resume_copies(4)
        assert hub.repository("model", "some-org/mine").branches["main"] == uploaded
    assert list(describe_copies(rig.run.process.settings)) == ["version 0 is at some-org/mine"]


async def test_trainer_that_fails_leaves_a_torn_checkpoint(rig: Rig) -> None:
    async def body() -> None:
        async with Checkpointer(rig.run, rig.runner) as checkpointer:
            await rig.checkpoint(checkpointer, 4)
            raise TetherError("another trainer has taken over")

    with pytest.raises(ExceptionGroup) as failed:
        await body()
    assert failed.group_contains(TetherError, match="taken over")
    rig.backend.may_write.set()
    async with Checkpointer(rig.run, rig.runner) as checkpointer:
        assert not await checkpointer.is_saved(4, 4)
    assert rig.versions() == []


async def test_a_checkpoint_without_room_is_owed_and_the_next_one_waits_for_room(rig: Rig) -> None:
    before = await rig.ledger.status()
    async with Checkpointer(rig.run, rig.runner) as checkpointer:
        await rig.checkpoint(checkpointer, 1)
        rig.backend.is_full.set()
        rig.backend.may_write.set()
        await checkpointer.finish()
        assert checkpointer.is_retry_due
        assert (rig.versions(), await rig.ledger.status()) == ([], before)
        rig.backend.is_full.clear()
        await rig.checkpoint(checkpointer, 0)
        assert not checkpointer.is_retry_due
        assert rig.versions() == [0]  # complete, and not only begun


async def test_a_fenced_trainer_does_not_wait_for_room_for_a_checkpoint(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointing, "RETRY_S", 0.01)
    rig.backend.is_full.set()
    rig.backend.may_write.set()

    async def body() -> None:
        async with asyncio.timeout(60), Checkpointer(rig.run, rig.runner) as checkpointer:
            await rig.checkpoint(checkpointer, 1)
            await checkpointer.finish()
            await rig.ledger.claim("e2")
            rig.backend.is_full.clear()
            await rig.checkpoint(checkpointer, 0)

    with pytest.raises(ExceptionGroup) as failed:
        await body()
    (refused,) = failed.value.exceptions
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.STALE_EPOCH
    assert rig.versions() == []


async def test_an_export_without_room_is_made_again_and_its_checkpoint_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = rig.path("checkpoints", "step_00000000", PART)
    rig.backend.may_write.set()

    def fails(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with Checkpointer(rig.run, rig.runner) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(Shards, "write", fails)
            await rig.checkpoint(checkpointer, 0)
            await checkpointer.finish()
        assert (checkpointer.is_retry_due, rig.versions()) == (True, [0])
        written = parts.stat()
        rig.backend.is_full.set()  # there is room for the export alone
        await rig.checkpoint(checkpointer, 0)
        assert (checkpointer.is_retry_due, rig.versions()) == (False, [0])
    assert parts.stat() == written
    export = load_file(rig.path("exports", "step_00000000", "model.safetensors"))[TENSOR]
    assert export.tolist() == [0] * len(export)
