"""The GPU benchmark without a GPU: a tiny model, the real engine, gloo. No timing is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.gpu.partner import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@pytest.mark.timeout(900)
def test_tiny_run_measures_the_projects_way_and_a_usual_one_and_both_bring_the_right_weights(
    tmp_path: Path,
) -> None:
    out = tmp_path / "bench.json"
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.gpu.run",
        "--tiny",
        "--parts",
        "nccl,per-tensor",
        "--minutes",
        "14",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880, check=False)
    facts = json.loads(out.read_text())
    assert facts["failed"] == {}, done.stderr[-4000:]
    assert done.returncode == 0
    assert {"copy on one GPU", "broadcast, one call a tensor"} <= set(facts["limits"]["ms"])
    for name, phases in (
        ("nccl", {"publish", "stage", "commit"}),
        ("per-tensor", {"pause", "transfer", "resume"}),
    ):
        part = facts["parts"][name]
        assert part["verified"] is True
        assert phases < set(part["ms"])
        assert part["gaps"]["undisturbed"]["n"] > 0
        assert f"| {name}" in done.stdout
