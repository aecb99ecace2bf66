"""Tests the tables of samples: those of the recorded run, and when a point has one."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.ledger.event_log.archiver import FILE as AUDIT
from services.run_record.samples import find_samples
from services.run_record.steps import FILE
from services.tracking.points import PointReader
from services.tracking.sample_table import COLUMNS, MAX_ROWS, POLL_S, SampleTables
from tests.services.monitor.runs import recorded_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return recorded_run(tmp_path / "run")


def test_rows_are_the_samples_of_the_step(run_dir: Path) -> None:
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in SampleTables(run_dir).rows(3)]
    found = find_samples(run_dir, 3, None, MAX_ROWS)
    assert [(row["step"], row["group"], row["prompt"]) for row in rows] == [
        (3, group["group"], group["prompt"]) for group in found["groups"] for _ in group["samples"]
    ]
    samples = [sample for group in found["groups"] for sample in group["samples"]]
    assert [(row["completion"], row["reward"]) for row in rows] == [(s["text"], s["reward"]) for s in samples]


def test_a_step_is_waited_for_that_the_event_log_has_not_got_yet(run_dir: Path) -> None:
    log, lines = run_dir / AUDIT, (run_dir / AUDIT).read_bytes().splitlines(keepends=True)
    commit = next(i for i, line in enumerate(lines) if b'"commit"' in line and b'"step":6' in line)
    log.write_bytes(b"".join(lines[:commit]))
    with ThreadPoolExecutor() as threads:
        rows = threads.submit(SampleTables(run_dir).rows, 6)
        time.sleep(3 * POLL_S)
        assert not rows.done()
        with log.open("ab") as file:
            file.writelines(lines[commit:])
        assert {row[0] for row in rows.result(timeout=60)} == {6}


class Clock:
    """Time that passes in waits alone."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("services.tracking.sample_table.time", clock)
    return clock


def waited(clock: Clock, tables: SampleTables, steps: range) -> Iterator[bool]:
    """Whether each step was waited for."""
    for step in steps:
        before = clock.now
        tables.rows(step)
        yield clock.now > before


def test_a_log_that_does_not_grow_is_waited_for_once(run_dir: Path, clock: Clock) -> None:
    log, lines = run_dir / AUDIT, (run_dir / AUDIT).read_bytes().splitlines(keepends=True)
    log.unlink()
    tables = SampleTables(run_dir)
    assert [*waited(clock, tables, range(3, 6))] == [True, False, False]
    log.write_bytes(lines[0])
    assert [*waited(clock, tables, range(3, 6))] == [True, False, False]
    log.write_bytes(b"".join(lines))
    assert {row[0] for row in tables.rows(6)} == {6}


def test_the_log_of_a_run_that_is_over_is_not_waited_for(run_dir: Path, clock: Clock) -> None:
    (run_dir / AUDIT).unlink()
    reader = PointReader(run_dir, 1)
    reader.finish()
    for line in (run_dir / FILE).read_bytes().splitlines():
        reader.items(FILE, line, 0)
    assert clock.now == 0.0


def test_a_step_without_records_has_no_rows(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.tracking.sample_table.LOGGED_S", 0.0)
    assert SampleTables(run_dir).rows(99) == []


def test_points_have_samples_every_so_many_steps(run_dir: Path) -> None:
    lines = (run_dir / FILE).read_bytes().splitlines()
    every_third = [PointReader(run_dir, 3).items(FILE, line, 0)[0] for line in lines]
    assert [point.version for point in every_third if point.samples] == [3, 6]
    assert not any(PointReader(run_dir).items(FILE, line, 0)[0].samples for line in lines)
