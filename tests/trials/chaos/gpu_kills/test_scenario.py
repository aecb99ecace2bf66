"""The kills on two GPUs, rehearsed on a CPU with a tiny model."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.command import environment
from tests.integration.loop import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("layout", "kills"), [("A", 2), ("B", 2)])
def test_a_run_recovers_from_each_kill(tmp_path: Path, layout: str, kills: int) -> None:
    words = ["--tiny", "--layouts", layout, "--minutes", "15", "--out", str(tmp_path / "kills.json")]
    finished = subprocess.run(
        [sys.executable, "-m", "tests.trials.chaos.gpu_kills", *words],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    last = finished.stdout.splitlines()[-1]
    assert last.startswith(f"kills={kills} ")
    assert last.endswith(" violations=0")
