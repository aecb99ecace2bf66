"""The benchmark runs and writes what `make bench` promises. No timing is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.table import figure, render
from tests.benchmarks.trainer import run as trainer
from tests.changes import slow_unless_changed
from tests.integration.loop import ROOT


@slow_unless_changed("tests/benchmarks/", "services/ledger/redis/")
def test_quick_ledger_benchmark_writes_figures_and_machine(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    command = [sys.executable, "-m", "tests.benchmarks.run", "--quick", "--only", "ledger", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(out.read_text())
    assert {"record", "date", "cpu", "versions", "load_average", "notes", "failed", "figures"} <= set(facts)
    assert facts["failed"] == {}
    for name in ("ledger.calls_per_group", "ledger.lifecycles_per_s"):
        assert set(facts["figures"][name]) == {"value", "reference", "ratio", "unit", "aim", "runs"}
        assert len(facts["figures"][name]["runs"]) == 1
        assert name in done.stdout
    assert list(tmp_path.iterdir()) == [out]


def test_small_trainer_benchmark_writes_figures_of_equal_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # restored, unlike what the benchmark sets
    out = tmp_path / "bench.json"
    trainer.main(["--smoke", "--rounds=1", "--threads=1", "--dtype=float32", f"--out={out}"])
    facts = json.loads(out.read_text())
    assert facts["gradient_norms"]["ours"] == pytest.approx(facts["gradient_norms"]["hf"], rel=1e-4)
    assert facts["figures"].keys() == {
        "padding_share", "packed_over_padded", "ours_over_hf", "logprobs_over_step", "shared_over_rows",
    }  # fmt: skip
    assert all(row.keys() == {"value", "aim", "at_most", "reached"} for row in facts["figures"].values())
    assert facts["figures"]["padding_share"]["reached"]  # counted, not timed


def test_figure_takes_medians_and_says_whether_the_aim_is_reached() -> None:
    runs = [{"ours": 8.0, "bare": 10.0}, {"ours": 9.0, "bare": 10.0}, {"ours": 1.0, "bare": 30.0}]
    row = figure(runs, "ours", unit="messages/s", reference="bare", aim=0.8)
    assert (row.value, row.reference, row.ratio, row.reached) == (8.0, 10.0, 0.8, True)
    assert "reached" in render({"bus": row})
    alone = figure([{"ours": 8.0}], "ours", unit="messages/s", reference="bare")
    assert (alone.reference, alone.ratio, alone.reached) == (None, None, None)
