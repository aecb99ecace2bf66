"""Tests how skipped steps are counted, and what a user reads of them."""

import io
from pathlib import Path

from protocol.messages import StepReport
from services.ledger.memory.ledger import MemoryLedger
from services.monitor.history import History
from services.observability.progress import Progress
from services.observability.skipped_steps import SkipLimit, count_skipped, halt_cause
from services.observability.status import collect_status, render_status
from services.observability.steps import StepLog
from tests.contracts.ledger_rig import Driver, MemoryRig

NAN = "the gradient's norm is nan"


def write_steps(path: Path) -> None:
    log = StepLog(path)
    for step, skipped in enumerate(("", NAN, "")):
        log.append(
            StepReport(step=step, version=step + 1, epoch="e1", reward_mean=0.0, groups=8, skipped=skipped)
        )


def test_count_skipped_counts_steps_and_their_groups() -> None:
    lines = [
        {"groups": 8, "skipped": ""},
        {"groups": 8, "skipped": "nan"},
        {"groups": 3, "skipped": "nan"},
        {},
    ]
    assert str(count_skipped(lines)) == "2 skipped steps of 11 groups"
    assert str(count_skipped(lines[:2])) == "1 skipped step of 8 groups"


def test_halt_cause_names_cause_and_likely_settings() -> None:
    text = halt_cause(3, NAN)
    assert text.startswith("3 steps in a row were skipped")
    assert NAN in text
    assert "trainer.max_skipped_steps" in text
    assert "algorithm.advantage_eps" in text
    assert "bound.max_staleness" in halt_cause(1, "no token of the batch is within the bound")


async def test_a_skipped_step_is_a_warning_on_the_terminal_and_no_trained_group(tmp_path: Path) -> None:
    driver = await Driver(MemoryRig()).begin()
    out = io.StringIO()
    progress = Progress(tmp_path, 3, out)
    write_steps(tmp_path / "metrics.jsonl")
    progress.finish(await driver.ledger.status())
    lines = out.getvalue().splitlines()
    assert lines[1].endswith(f"SKIPPED, no weight changed: {NAN}")
    assert "groups trained (but for 1 skipped step of 8 groups, which changed no weights)" in lines[-1]


async def test_a_skipped_step_is_in_the_status_with_the_halt(tmp_path: Path) -> None:
    driver = await Driver(MemoryRig()).begin()
    assert isinstance(driver.ledger, MemoryLedger)
    write_steps(tmp_path / "metrics.jsonl")
    await driver.ledger.halt("e1", halt_cause(3, NAN))
    status = await collect_status(driver.ledger, tmp_path)
    assert (status["skipped_steps"], status["skipped_groups"]) == (1, 8)
    text = render_status(status)
    assert "warning: 1 skipped step of 8 groups, counted as trained, changed no weights" in text
    assert "halted: 3 steps in a row were skipped" in text
    assert "check optimizer.lr" in text


def test_a_skipped_step_is_counted_for_the_page_also_in_a_wider_point(tmp_path: Path) -> None:
    write_steps(tmp_path / "metrics.jsonl")
    for points in (2, 2000):
        history = History(tmp_path / "metrics.jsonl", max_points=points)
        while history.read_more():
            pass
        assert history.since(0)["skipped"] == 1
        assert [item["text"] for item in history.warnings()] == [
            f"Step 1 was skipped and changed no weights: {NAN}."
        ]


def test_skip_limit_is_reached_by_skipped_steps_in_a_row() -> None:
    limit = SkipLimit(2)
    causes = [limit.cause_after(skipped) for skipped in (NAN, "", NAN, NAN)]
    assert causes[:3] == ["", "", ""]
    assert causes[3] == halt_cause(2, NAN)
    assert limit.cause_after(NAN) == ""  # counted anew after the halt
    assert limit.cause_after(NAN) != ""


def test_skip_limit_of_one_allows_no_skipped_step() -> None:
    limit = SkipLimit(1)
    assert limit.cause_after("") == ""
    assert limit.cause_after(NAN) != ""
