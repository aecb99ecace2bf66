"""Tests what is printed of a step: a dash where nothing was measured, and its warnings."""

import io
from pathlib import Path

from protocol.messages import StepReport
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
