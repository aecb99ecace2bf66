"""Tests the trace file of the recorded run for Perfetto."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli import app
from services.run_record.steps import read_steps
from tests.services.monitor.runs import recorded_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return recorded_run(tmp_path / "run")


def test_the_command_writes_a_file_with_every_step_and_group(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    answer = CliRunner().invoke(app, ["trace", str(run_dir), "--perfetto", str(out)])
    assert answer.exit_code == 0, answer.output
    records: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    lines = read_steps(run_dir / "metrics.jsonl")
    trained = [record for record in records if record["name"].startswith("train ")]
    assert [record["name"] for record in trained] == [f"train {line['step']}" for line in lines]
    assert [record["dur"] / 1e6 for record in trained] == pytest.approx(
        [line["train_s"] for line in lines], abs=1e-6
    )
    ends = [r for r in records if r["ph"] == "X" and r["args"].get("outcome") == "trained"]
    assert len(ends) == sum(line["groups"] for line in lines)
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for record in records:
        if record["ph"] == "X" and record["tid"]:
            lanes.setdefault((record["pid"], record["tid"]), []).append((record["ts"], record["dur"]))
    for spans in lanes.values():
        spans.sort()
        assert all(a + length <= b for (a, length), (b, _) in pairwise(spans))


def test_the_command_needs_a_group_or_a_file(run_dir: Path) -> None:
    answer = CliRunner().invoke(app, ["trace", str(run_dir)])
    assert "GROUP, or --perfetto FILE" in str(answer.exception)
