"""The example that compares bounds, on the files of runs that are complete."""

import json
import subprocess
import sys
from pathlib import Path

from tests.benchmarks.versions import ROOT

SCRIPT = ROOT / "deploy/examples/async_vs_sync/compare.py"
BOUNDS, SEEDS, STEPS = (0, 4), (0, 1, 2), 8


def complete_run(directory: Path, bound: int, seed: int) -> None:
    """Write what a run with a reward that rises by 0.1 a step, from 0.01 for each seed, leaves."""
    directory.mkdir(parents=True)
    (directory / "settings.json").write_text('{"sampling": {"samples_per_prompt": 8}}')
    lines = [
        {
            "time": 1000.0 + step,
            "train_s": 0.75,
            "publish_s": 0.25,
            "groups": 16,
            "reward_mean": 0.1 * step + 0.01 * seed,
            "lag_histogram": {"0": 10} if bound == 0 else {"0": 10, str(bound): 30},
            "trained_tokens": 100,
            "engine_busy": None if step == 0 else 0.5,
        }
        for step in range(STEPS)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "done").touch()


def test_the_table_has_means_with_confidence_intervals(tmp_path: Path) -> None:
    for bound in BOUNDS:
        for seed in SEEDS:
            complete_run(tmp_path / f"e{bound}_seed{seed}", bound, seed)
    command = [sys.executable, str(SCRIPT), "none.toml", "--out", str(tmp_path), "--reach", "0.4"]
    command += ["--bounds", "0,4", "--seeds", "0,1,2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert rows[0][:4] == ["E", "seeds", "reward at the end", "samples to 0.4"]
    by_bound = {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}
    # 0.5, 0.51, 0.52 at the end: s = 0.01, t = 4.303 for two degrees of freedom, over the root of three
    assert by_bound["4"]["reward at the end"] == "0.51 ± 0.025"
    # the mean of five steps is 0.4 after step 6 with seed 0, and sooner by a tenth of a step for each seed
    assert by_bound["0"]["samples to 0.4"] == "883 ± 32"
    assert by_bound["0"]["mean lag"] == "0 ± 0"
    assert by_bound["4"]["mean lag"] == "3 ± 0"
    assert by_bound["4"]["seconds"] == "8 ± 0"
    assert by_bound["4"]["engine busy"] == "0.5 ± 0"
