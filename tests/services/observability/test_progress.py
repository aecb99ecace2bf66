"""Tests what is printed of a step: a dash where nothing was measured, and its warnings."""

import asyncio
import io
from pathlib import Path

from protocol.messages import StepReport
from services.ledger.interface import Peer
from services.observability.progress import Progress, describe_step
from services.observability.steps import StepLog, read_steps
from tests.contracts.ledger_rig import Driver, MemoryRig


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


async def test_a_full_disk_is_printed_once_and_again_when_it_has_room(tmp_path: Path) -> None:
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
        await printed({f"room: the disk of {tmp_path} is full": 0.5}, f"the disk of {tmp_path} is full")
        await printed({}, f"the disk of {tmp_path} has room again")
        watching.cancel()
    assert out.getvalue().count("is full") == 1
