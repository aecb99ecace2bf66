"""Runs with a model that has a process of the trainer to itself, which is killed, and which resume."""

from pathlib import Path

import psutil
import pytest

from services.run_record.steps import read_steps
from tests.integration.command import audit, processes_of, tether, tether_up, until
from tests.integration.loop import ROOT

OVERRIDES = (
    "engine.name=hf", "eval.at_end=false", "monitor.enabled=false", "trainer.checkpoint_every=2",
)  # fmt: skip
ROLES = {
    "reference_kl_k3": ("algorithm.kl_coef=0.1", "placement.reference=1"),
    "value_loss": ("algorithm.name=ppo", "placement.critic=1"),
}
"""A number that only the model makes -> what places it."""


def arguments(run_dir: Path, steps: int, *more: str) -> list[str]:
    words = [word for override in (*OVERRIDES, *more) for word in ("--set", override)]
    demo = str(ROOT / "deploy/configs/demo.toml")
    return [demo, "--run-dir", str(run_dir), "--steps", str(steps), *words]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("measured", ROLES)
def test_a_killed_rank_of_a_model_apart_ends_the_trainer_which_continues(
    measured: str, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with tether_up(*arguments(tmp_path, 6, *ROLES[measured]), output=tmp_path / "up.log") as up:
        until(lambda: len(read_steps(metrics)) >= 2, seconds=180, what="two steps")
        processes = (psutil.Process(pid) for pid in processes_of(tmp_path))
        ranks = {p.environ()["RANK"]: p for p in processes if "RANK" in p.environ()}
        assert sorted(ranks) == ["0", "1"]
        ranks["1"].kill()
        ranks["0"].wait(60)
        assert up.wait(240) == 0, (tmp_path / "up.log").read_text()
    again = tether("up", *arguments(tmp_path, 8, *ROLES[measured]), seconds=240)
    assert again.returncode == 0, again.stdout + again.stderr
    steps = read_steps(metrics)
    assert [step["step"] for step in steps] == list(range(8))
    assert all(step[measured] is not None for step in steps)
    assert audit(tmp_path)["violations"] == []
    assert processes_of(tmp_path) == []
