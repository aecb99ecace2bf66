"""Every decoder on its seeds, which include all inputs that fuzzing has found, and a short fuzzing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.changes import slow_unless_changed
from tests.trials.fuzz import given, stored, wire
from tests.trials.fuzz.target import Target

ROOT = Path(__file__).parents[3]
TARGETS: dict[str, Target] = {**wire.TARGETS, **stored.TARGETS, **given.TARGETS}


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_read_or_refused(name: str, tmp_path: Path) -> None:
    for seed in TARGETS[name].seeds:
        TARGETS[name].check(seed, tmp_path)
        TARGETS[name].check(seed[: len(seed) // 2], tmp_path)


DECODERS = slow_unless_changed(
    "protocol/", "reward/", "rollout/prompts/", "services/ledger/", "services/run_record/",
    "services/settings/", "trainer/data/", "trainer/storage/", "tests/trials/fuzz/",
)  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "runs"), [pytest.param(20, 100, marks=DECODERS), pytest.param(60, -1, marks=pytest.mark.slow)]
)
def test_fuzzing_finds_nothing(tmp_path: Path, seconds: int, runs: int) -> None:
    command = [
        sys.executable, "-m", "tests.trials.fuzz.run", "--seconds", str(seconds), "--runs", str(runs),
        "--seed", "1", "--out", str(tmp_path),
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stderr
    totals = json.loads(ended.stdout)
    assert totals["crashes"] == 0
    assert set(totals["targets"]) == set(TARGETS)
    assert all(tally["executions"] > 0 for tally in totals["targets"].values()), totals
