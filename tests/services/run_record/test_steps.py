"""Tests metrics.jsonl as a run leaves it.

Incomplete lines, crashes before a line was written, steps made again after a rewind.
"""

import io
import resource
from pathlib import Path

import msgspec
import pytest

from protocol.codec import encode_payload
from protocol.messages import StepReport, WeightApplied
from services.ledger.event_log.hash_chain import damaged_lines
from services.monitor.history import History
from services.observability.status import collect_status, render_status
from services.run_record.progress import Progress, plot_run
from services.run_record.steps import (
    StepLog,
    count_skipped,
    epoch_starts,
    numbers_of,
    parse_line,
    read_lines,
    read_steps,
    step_facts,
)
from services.trainer.step_report import halt_cause
from tests.contracts.ledger_rig import Driver, MemoryRig
from tests.contracts.memory_ledger.ledger import MemoryLedger

NAN = "the gradient's norm is nan"


def report(step: int, epoch: str = "e1", reward: float = 0.5) -> StepReport:
    return StepReport(step=step, version=step + 1, epoch=epoch, reward_mean=reward)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def made(path: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["epoch"]) for line in read_steps(path)]


def test_a_file_that_is_not_there_has_no_steps(path: Path) -> None:
    assert read_steps(path) == []


def test_each_epoch_starts_where_its_trainer_took_over(path: Path) -> None:
    assert epoch_starts(path) == {}
    log = StepLog(path)
    for step, epoch in ((0, "e1"), (1, "e1"), (2, "e2"), (1, "e3"), (2, "e3"), (1, "e1")):
        log.append(report(step, epoch))
    assert list(epoch_starts(path).items()) == [("e1", 0), ("e2", 2), ("e3", 1)]


def test_steps_are_read_as_they_were_written(path: Path) -> None:
    log = StepLog(path)
    for step in range(3):
        log.append(report(step))
    assert made(path) == [(0, "e1"), (1, "e1"), (2, "e1")]
    assert len(path.read_text().splitlines()) == 3


def test_of_a_step_made_again_the_last_line_counts(path: Path) -> None:
    log = StepLog(path)
    for step, epoch in [(0, "e1"), (1, "e1"), (2, "e1"), (1, "e2"), (2, "e2")]:
        log.append(report(step, epoch))
    assert made(path) == [(0, "e1"), (1, "e2"), (2, "e2")]
    assert len(list(read_lines(path))) == 5


def test_a_torn_last_line_is_left_out(path: Path) -> None:
    log = StepLog(path)
    log.append(report(0))
    path.write_bytes(path.read_bytes() + b'{"step":1,"vers')
    assert made(path) == [(0, "e1")]


def test_a_line_for_which_the_disk_has_no_room_is_reported(path: Path) -> None:
    log = StepLog(path)
    log.append(report(0))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 40, unlimited[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            log.append(report(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    log.append(report(1))
    assert made(path) == [(0, "e1"), (1, "e1")]


def test_a_line_after_a_torn_one_is_not_lost(path: Path) -> None:
    path.write_bytes(b'{"step":0,"vers')
    StepLog(path).append(report(1))
    assert made(path) == [(1, "e1")]


@pytest.mark.parametrize("lost", [1, 30])
def test_steps_unwritten_at_a_crash_are_filled_in_once(path: Path, lost: int) -> None:
    """A loss of power cuts lines that are not synced, also just before their newline."""
    log = StepLog(path)
    for step in range(2):
        log.append(report(step))
    path.write_bytes(path.read_bytes()[:-lost])
    assert list(damaged_lines(path)) == [
        (path, "line 2, its last one, is cut: the newest line that metrics.head names is missing")
    ]
    assert made(path) == [(0, "e1")]
    recorded = [encode_payload(report(step)) for step in range(3)]
    log.backfill(recorded)
    log.backfill(recorded)
    assert made(path) == [(0, "e1"), (1, "e1"), (2, "e1")]
    assert len(list(read_lines(path))) == 3
    assert list(damaged_lines(path)) == []


def test_only_reports_are_filled_in(path: Path) -> None:
    StepLog(path).backfill([encode_payload(WeightApplied(engine="x", epoch="e1", version=1, pause_ms=1.0))])
    assert made(path) == []


def test_a_run_without_steps_has_no_picture(tmp_path: Path) -> None:
    assert plot_run(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_the_picture_of_a_run_is_a_png(path: Path) -> None:
    log = StepLog(path)
    for step in range(4):
        log.append(report(step, reward=step / 4))
    picture = plot_run(path.parent)
    assert picture == path.parent / "progress.png"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


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


async def test_a_skipped_step_is_a_warning_on_the_terminal_and_no_trained_group(tmp_path: Path) -> None:
    driver = await Driver(MemoryRig()).begin()
    out = io.StringIO()
    progress = Progress(tmp_path, 3, out)
    write_steps(tmp_path / "metrics.jsonl")
    progress.finish(await driver.ledger.status())
    lines = out.getvalue().splitlines()
    assert lines[1].endswith(f"SKIPPED, no weight changed: {NAN}")
    assert "groups trained (but for 1 skipped step of 8 groups, which changed no weights)" in lines[-2]


async def test_a_skipped_step_is_in_the_status_with_the_halt(tmp_path: Path) -> None:
    driver = await Driver(MemoryRig()).begin()
    assert isinstance(driver.ledger, MemoryLedger)
    write_steps(tmp_path / "metrics.jsonl")
    await driver.ledger.halt("e1", halt_cause(3, NAN))
    status = await collect_status(driver.ledger) | step_facts(tmp_path)
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


def test_the_time_since_the_last_step_counts_only_while_the_run_is_on(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "metrics.jsonl")
    for step in range(3):
        log.append(msgspec.structs.replace(report(step), time=1e9 + 2 * step))  # long ago
    assert step_facts(tmp_path, is_over=True)["seconds_per_step"] == 2
    assert step_facts(tmp_path)["seconds_per_step"] > 1e6


@pytest.mark.parametrize("step", ["true", "-1", '"1"', "1.5", "9007199254740992"])
def test_lines_whose_step_is_no_exact_number_are_skipped(step: str) -> None:
    assert parse_line(b'{"step": 1, "epoch": "e1"}') == {"step": 1, "epoch": "e1"}
    assert parse_line(f'{{"step": {step}, "epoch": "e1"}}'.encode()) is None


@pytest.mark.parametrize(
    "wrong", ['"version": "1"', '"version": null', '"groups": []', '"time": "now"', '"time": -1e308']
)
def test_lines_with_wrong_counts_or_times_are_skipped(wrong: str) -> None:
    line = f'{{"step": 1, "version": 2, "time": 1.5, "epoch": "e1", {wrong}}}'
    assert parse_line(line.encode()) is None


def test_tables_by_name_become_a_number_each() -> None:
    line = {
        "reward_by_source": {"gsm8k": 0.5},
        "score_by_verifier": {"math": 0.25},
        "dropped_by_reason": {"a": 2},
    }
    expected = {"reward_of_gsm8k": 0.5, "score_by_math": 0.25, "dropped_for_a": 2}
    assert dict(numbers_of(line)) == expected
    assert dict(numbers_of({"reward_by_source": 3.0})) == {"reward_by_source": 3.0}
