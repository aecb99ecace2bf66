"""Tests how a run waits for its last evaluation, and what it says of versions without scores."""

import asyncio
from pathlib import Path

import pytest

from services.launcher.child import ServiceSpec, SupervisedProcess
from services.launcher.finishing import (
    describe_unscored,
    describe_versions,
    finish_evaluation,
    waiting_versions,
)
from services.run_record.evaluations import SNAPSHOTS, Evaluation, append_evaluation
from services.settings.sections import EvalConfig, RunConfig, Settings


@pytest.fixture
def process(tmp_path: Path) -> SupervisedProcess:
    """The evaluation; it is never started."""
    return SupervisedProcess(ServiceSpec("evaluation", "services.evaluation", {}), tmp_path / "log", 1)


def settings_of(run_dir: Path, finish_s: float = 60) -> Settings:
    return Settings(run=RunConfig(dir=str(run_dir)), eval=EvalConfig(every=2, finish_s=finish_s))


def snapshot(run_dir: Path, version: int) -> Path:
    path = run_dir / SNAPSHOTS / f"v{version:08d}-e1"
    path.mkdir(parents=True)
    return path


async def test_end_of_a_run_waits_until_no_snapshot_is_left(
    tmp_path: Path, process: SupervisedProcess
) -> None:
    paths = [snapshot(tmp_path, version) for version in (4, 6)]
    (tmp_path / SNAPSHOTS / "v00000008-e1.tmp").mkdir()
    assert waiting_versions(tmp_path) == [4, 6]
    said: list[str] = []
    async with asyncio.TaskGroup() as tasks:
        end = tasks.create_task(
            finish_evaluation(settings_of(tmp_path), process, asyncio.Event(), said.append)
        )
        while not said:  # noqa: ASYNC110 (waits for another task)
            await asyncio.sleep(0)
        assert not end.done()
        for path in paths:
            path.rmdir()
    assert said == ["the run is done; up to 60 s for the evaluation of versions 4, 6"]


@pytest.mark.parametrize("reason", ["time", "stop", "finished", "nothing", "none"])
async def test_end_of_a_run_does_not_wait_for_ever(
    tmp_path: Path, process: SupervisedProcess, reason: str
) -> None:
    if reason != "nothing":
        snapshot(tmp_path, 4)
    stop = asyncio.Event()
    if reason == "stop":
        stop.set()
    if reason == "finished":
        process.finished.set()
    settings = settings_of(tmp_path, finish_s=0 if reason == "time" else 1e6)
    await finish_evaluation(settings, None if reason == "none" else process, stop, lambda _: None)


def test_versions_without_scores_are_named(tmp_path: Path, process: SupervisedProcess) -> None:
    settings = settings_of(tmp_path)
    assert describe_unscored(settings, 0, 6, None) == ""
    for version in (0, 4, 6):
        append_evaluation(tmp_path, Evaluation(version=version, set="math"))
    assert describe_unscored(settings, 4, 6, process) == ""
    assert describe_unscored(settings, 0, 7, process) == (
        "evaluation: 3 of 5 versions were scored, not versions 2, 7 (not in time, see docs/evaluation.md)"
    )
    process.failure_reason = "evaluation died 6 times in a minute"
    assert describe_unscored(settings, 6, 7, process) == (
        "evaluation: 1 of 2 versions were scored, not version 7; evaluation died 6 times in a minute"
    )
    assert describe_versions(list(range(12))) == "versions 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
