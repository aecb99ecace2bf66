"""The example of deploy/examples/hybrid: hybrids learn in the loop, with exact log-probabilities."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.tools.check import check_configuration
from tests.integration.command import audit, environment, tether
from tests.integration.loop import ROOT

EXAMPLE = ROOT / "deploy/examples/hybrid"
STEPS = 20


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model_type", "backend"),
    [("qwen3_next", "fsdp"), ("qwen3_5_text", "fsdp"), ("qwen3_next", "megatron")],
)
def test_a_hybrid_learns_in_the_loop(tmp_path: Path, model_type: str, backend: str) -> None:
    model, run_dir = tmp_path / "model", tmp_path / "run"
    subprocess.run(
        [sys.executable, str(EXAMPLE / "make_model.py"), model_type, str(model)],
        cwd=ROOT, env=environment(PYTHONPATH=str(ROOT)), check=True,
    )  # fmt: skip
    given = [f"model.path={model}", "monitor.enabled=false", f"trainer.backend={backend}"]
    assert check_configuration(str(EXAMPLE / "hybrid.toml"), [*given, f"run.dir={run_dir}"]).problems == []
    words = [word for setting in given for word in ("--set", setting)]
    done = tether(
        "up", str(EXAMPLE / "hybrid.toml"), "--run-dir", str(run_dir), "--steps", str(STEPS), *words,
        seconds=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert audit(run_dir)["violations"] == []
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    reports = [step for step in steps if step["kind"] == "step_report"]
    rewards = [report["reward_mean"] for report in reports]
    assert len(rewards) == STEPS
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.5
    exact = [report["mismatch"]["0"]["error_max"] for report in reports if "0" in report["mismatch"]]
    assert exact
    assert max(exact) < 1e-5
