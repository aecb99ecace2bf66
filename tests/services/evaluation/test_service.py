"""Tests the loop that scores snapshots, with a scripted engine."""

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from protocol.messages import WeightManifest
from protocol.topics import Role
from rollout.prompts.base import Prompt
from services.evaluation.scoring import open_scorer
from services.evaluation.service import (
    Evaluator,
    is_scored,
    next_snapshot,
    read_snapshots,
    remove_skip_marks,
    remove_snapshot,
    score_keys,
)
from services.launcher.finishing import waiting_versions
from services.observability.service_rows import ROOM
from services.run_record.evaluations import SNAPSHOTS, Evaluation, append_evaluation, read_evaluations
from services.runtime.process import Process
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.services.bus.harness import eventually
from tests.services.evaluation.test_scoring import settings_of, version
from tests.small_disks import small_disk
from trainer.config import WeightConfig
from trainer.weights.files import disk_sender

PROMPTS = [Prompt(text="123=", metadata={"answer": "1"})]


async def test_a_damaged_snapshot_that_was_begun_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("services.evaluation.service.RETRY_S", 0.0)
    settings = settings_of(tmp_path, "eval.every=2", "eval.samples=0")
    damaged, _ = (version(tmp_path / SNAPSHOTS, number) for number in (2, 4))
    append_evaluation(tmp_path, Evaluation(version=2, digest=f"{damaged.digest:016x}", set="math"))
    weights = Path(damaged.location) / "bucket_00000.bin"
    weights.write_bytes(weights.read_bytes()[:-1])
    process = Process(Role.EVALUATION, settings, cast(Any, MemoryLedger()), "evaluation")
    async with open_scorer(settings, "eval") as scorer, asyncio.TaskGroup() as tasks:
        evaluator = Evaluator(process, scorer, {"math": PROMPTS, "code": PROMPTS})
        scoring = tasks.create_task(evaluator.evaluate_loop())
        await eventually(lambda: len(list(read_evaluations(tmp_path))) == 3)
        await eventually(lambda: waiting_versions(tmp_path) == [])  # the end of the run does not wait for it
        scoring.cancel()
    assert [row.version for row in read_evaluations(tmp_path)] == [2, 4, 4]
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert f"evaluation.left_out snapshot={damaged.location} attempts=3" in errors[0]
    remove_skip_marks(tmp_path)
    assert waiting_versions(tmp_path) == [2]


async def test_scores_wait_for_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.runtime.writing.RETRY_S", 0.01)
    with small_disk(tmp_path / "run", 4096) as run_dir:
        settings = settings_of(run_dir, "eval.every=2", "eval.samples=0")
        version(run_dir / SNAPSHOTS, 2)
        process = Process(Role.EVALUATION, settings, cast(Any, MemoryLedger()), "evaluation")
        async with open_scorer(settings, "eval") as scorer, asyncio.TaskGroup() as tasks:
            evaluator = Evaluator(process, scorer, {"math": PROMPTS})
            filler = run_dir / "filler"
            with pytest.raises(OSError, match="No space left"):
                filler.write_bytes(bytes(4 << 20))
            scoring = tasks.create_task(evaluator.evaluate_loop())
            await eventually(lambda: any(ROOM in wait for wait in process.waits))
            filler.unlink()
            await eventually(lambda: waiting_versions(run_dir) == [])
            scoring.cancel()
        assert [row.version for row in read_evaluations(run_dir)] == [2]


SETS = ("math", "code")


def written(run_dir: Path, version: int, epoch: str = "e1", value: float | None = None) -> WeightManifest:
    """A snapshot as the trainer writes it."""
    sender = disk_sender(WeightConfig(directory=str(run_dir / SNAPSHOTS)), run_dir)
    tensor = torch.full((3,), float(version) if value is None else value)
    return sender.publish(epoch, version, [("weight", tensor)])


def test_read_snapshots_finds_complete_versions_in_order(tmp_path: Path) -> None:
    assert read_snapshots(tmp_path) == []
    manifests = [written(tmp_path, version) for version in (10, 0, 2)]
    (tmp_path / SNAPSHOTS / "v00000012-e1").mkdir()  # being removed: its manifest is gone already
    (tmp_path / SNAPSHOTS / "v00000014-e1.tmp").mkdir()
    found = read_snapshots(tmp_path)
    assert [snapshot.version for snapshot in found] == [0, 2, 10]
    assert found[2] == manifests[0]


def test_moved_run_directory_is_read_where_it_is(tmp_path: Path) -> None:
    written(tmp_path / "old", 4)
    shutil.move(tmp_path / "old", tmp_path / "new")
    (found,) = read_snapshots(tmp_path / "new")
    assert found.location == str(tmp_path / "new" / SNAPSHOTS / "v00000004-e1")
    remove_snapshot(found)
    remove_snapshot(found)
    assert read_snapshots(tmp_path / "new") == []


def test_next_snapshot_is_what_was_begun_then_the_first_then_the_newest(tmp_path: Path) -> None:
    first, older, newest = (written(tmp_path, version) for version in (0, 2, 4))
    snapshots = [first, older, newest]
    scored: set[tuple[int, str, str]] = set()
    order = []
    while (chosen := next_snapshot(snapshots, scored, SETS)) is not None:
        order.append(chosen.version)
        scored |= set(score_keys(chosen, SETS))
    assert order == [0, 4, 2]
    assert next_snapshot(snapshots, {score_keys(older, SETS)[0]}, SETS) == older
    assert next_snapshot([], set(), SETS) is None


def test_other_weights_of_the_same_version_are_scored_again(tmp_path: Path) -> None:
    before = written(tmp_path, 4)
    after = written(tmp_path, 4, epoch="e2", value=7.0)
    same = written(tmp_path, 4, epoch="e3", value=7.0)
    scored = set(score_keys(before, SETS))
    assert not is_scored(after, scored, SETS)
    scored |= set(score_keys(after, SETS))
    assert is_scored(same, scored, SETS)
