"""Tests what is printed while a run is on: steps, warnings, evaluations, failed scores, a full disk."""

import asyncio
import io
from pathlib import Path

import pytest

from protocol.messages import StepReport
from protocol.topics import Role
from services.launcher.child import ServiceSpec, SupervisedProcess
from services.ledger.interface import Peer
from services.run_record.evaluations import Evaluation, append_evaluation, describe_evaluation
from services.run_record.progress import FAILED, MAX_FAILURES, Progress, describe_step, report_failures_loop
from services.run_record.steps import StepLog, read_steps
from tests.contracts.ledger_rig import Driver, MemoryRig
from tests.contracts.memory_ledger.ledger import MemoryLedger


async def test_warnings_of_a_step_are_printed_below_it(tmp_path: Path) -> None:
    driver = await Driver(MemoryRig()).begin()
    out = io.StringIO()
    progress = Progress(tmp_path, 3, out)
    step = StepReport(step=0, version=1, epoch="e1", reward_mean=0.5, warnings=("step 0: they disagree",))
    StepLog(tmp_path / "metrics.jsonl").append(step)
    progress.finish(await driver.ledger.status())
    lines = out.getvalue().splitlines()
    assert lines[0] == describe_step(read_steps(tmp_path / "metrics.jsonl")[0], 3, 0)
    assert "lag - max -" in lines[0]
    assert lines[1] == "warning: step 0: they disagree"


@pytest.mark.parametrize("place", ["", "versions"])
async def test_a_full_disk_is_printed_once_and_again_when_it_has_room(tmp_path: Path, place: str) -> None:
    """The line names the directory whose disk is full: the run directory, or the directory of versions."""
    disk = tmp_path / place
    ledger = (await Driver(MemoryRig()).begin()).ledger
    out = io.StringIO()
    progress = Progress(tmp_path, 3, out)

    async def printed(waits: dict[str, float], line: str) -> None:
        await ledger.register(
            Peer("trainer", "trainer.1", {"name": "trainer", "waits": waits}), ttl_ms=60_000
        )
        while line not in out.getvalue():  # noqa: ASYNC110 (a buffer tells nobody)
            await asyncio.sleep(0.01)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(progress.watch_loop(ledger, {}))
        await printed(
            {f"room: the disk of {disk} is full": 0.5}, f"the disk of {disk} is full: the run waits"
        )
        assert progress.is_full == (disk == tmp_path)
        await printed({}, f"the disk of {disk} has room again")
        watching.cancel()
    assert out.getvalue().count("is full") == 1


@pytest.mark.parametrize(("steps", "more"), [(2, ["trainer: starts"]), (1, [])])
async def test_a_process_that_has_ended_after_the_last_step_is_not_said_to_start(
    steps: int, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = (await Driver(MemoryRig()).begin()).ledger
    waits = {"name": "rollout.0", "waits": {"a lease: done": 9.0}}
    await ledger.register(Peer(Role.ROLLOUT, "rollout.0.1", waits), ttl_ms=60_000)
    trainer = SupervisedProcess(ServiceSpec("trainer", "services.trainer", {}), tmp_path / "log", restarts=1)
    monkeypatch.setattr("services.run_record.progress.QUIET_S", 0.0)
    out = io.StringIO()
    progress = Progress(tmp_path, steps, out)
    StepLog(tmp_path / "metrics.jsonl").append(StepReport(step=0, version=1, epoch="e1", reward_mean=0.5))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(progress.watch_loop(ledger, {Role.TRAINER: [trainer]}))
        while "waiting: " not in out.getvalue():  # noqa: ASYNC110 (a buffer tells nobody)
            await asyncio.sleep(0.01)
        watching.cancel()
    said = "rollout.0: has nothing left to generate, 9 s so far"
    last = out.getvalue().splitlines()[-1].removeprefix("waiting: ")
    assert sorted(last.split("; ")) == [said, *more]


async def test_each_kind_of_failure_is_reported_once() -> None:
    ledger = MemoryLedger()
    texts = [f"function: /x/my_reward.py:12: KeyError: {n}" for n in range(3)]
    texts += [f"math: {'x' * n}" for n in range(MAX_FAILURES + 5)]
    for number, text in enumerate(texts):
        await ledger.register(
            Peer(Role.REWARD, f"reward.{number}", {"name": f"reward.{number}", FAILED: text}), ttl_ms=60_000
        )
    reported: list[str] = []
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        loop = tasks.create_task(report_failures_loop(ledger, reported.append))
        while len(reported) < MAX_FAILURES:  # noqa: ASYNC110 (the loop has no event)
            await asyncio.sleep(0)
        loop.cancel()
    assert len(reported) == MAX_FAILURES
    assert sum("/x/my_reward.py:12: KeyError" in line for line in reported) == 1


async def test_evaluations_are_printed_once(tmp_path: Path) -> None:
    status = await (await Driver(MemoryRig()).begin()).ledger.status()
    first, second = (Evaluation(version=v, set="math", greedy=0.5) for v in (2, 4))
    append_evaluation(tmp_path, first)
    out = io.StringIO()
    progress = Progress(tmp_path, 3, out)
    append_evaluation(tmp_path, second)
    for _ in range(2):
        progress.finish(status)
    assert [line for line in out.getvalue().splitlines() if line.startswith("evaluation")] == [
        describe_evaluation(second)
    ]


async def test_a_fallen_score_is_warned_of_with_its_evaluation(tmp_path: Path) -> None:
    status = await (await Driver(MemoryRig()).begin()).ledger.status()
    out = io.StringIO()
    progress = Progress(tmp_path, 3, out)
    for version, greedy in ((2, 0.5), (4, 0.125)):
        append_evaluation(
            tmp_path, Evaluation(version=version, set="math", greedy=greedy, greedy_stderr=0.0625)
        )
    progress.finish(status)
    lines = [line for line in out.getvalue().splitlines() if line.startswith(("evaluation", "warning"))]
    assert [line.split(":")[0] for line in lines] == [
        "evaluation of version 2 on math", "evaluation of version 4 on math", "warning"
    ]  # fmt: skip
    assert "math has fallen" in lines[-1]
