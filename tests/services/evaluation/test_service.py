"""Tests the loop that scores snapshots, with a scripted engine."""

import asyncio
import logging
from pathlib import Path
from typing import Any, cast

import pytest

from protocol.topics import Role
from rollout.prompts.base import Prompt
from services.evaluation.scoring import open_scorer
from services.evaluation.service import Evaluator
from services.evaluation.snapshots import forget_left_out
from services.launcher.finishing import waiting_versions
from services.run_record.evaluations import SNAPSHOTS, Evaluation, append_evaluation, read_evaluations
from services.runtime.process import Process
from tests.contracts.memory_ledger.ledger import MemoryLedger
from tests.services.bus.harness import eventually
from tests.services.evaluation.test_scoring import settings_of, version

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
    forget_left_out(tmp_path)
    assert waiting_versions(tmp_path) == [2]
