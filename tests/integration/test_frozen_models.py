"""Runs the recipes with given tokens and with a teacher: they learn, verify, and resume with that teacher."""

import shutil
from pathlib import Path

import pytest

from services.run_record.steps import read_steps
from tests.integration.command import audit, tether
from tests.integration.loop import ROOT

RECIPES = ROOT / "deploy/examples/recipes"
QUIET = ("--set", "monitor.enabled=false", "--set", "eval.at_end=false")


def up(recipe: str, run_dir: Path, steps: int, *overrides: str) -> str:
    """Run it to that step; returns what it wrote to the terminal."""
    given = [part for override in overrides for part in ("--set", override)]
    config = str(RECIPES / f"{recipe}.toml")
    done = tether("up", config, "--run-dir", str(run_dir), "--steps", str(steps), *QUIET, *given)
    assert done.returncode == 0, done.stdout + done.stderr
    assert audit(run_dir)["violations"] == []
    return done.stderr


def series(run_dir: Path, name: str) -> list[float]:
    return [step[name] for step in read_steps(run_dir / "metrics.jsonl")]


def check(sft: Path, distilled: Path, steps: int) -> None:
    losses, kl = series(sft, "loss"), series(distilled, "teacher_kl_k1")
    assert len(losses) == len(kl) == steps
    assert losses[-1] < losses[0]
    assert set(series(sft, "reward_mean")) == {1.0}
    for name in ("ratio_mean", "mismatch_mean", "importance_mean", "teacher_kl_k1"):
        assert set(series(sft, name)) == {None}
    assert all(value is not None for value in kl)


@pytest.mark.slow
def test_given_tokens_make_a_teacher_to_which_a_run_is_held(tmp_path: Path) -> None:
    sft, distilled = tmp_path / "sft", tmp_path / "distilled"
    up("sft", sft, 4)
    teacher = tmp_path / "teacher"
    shutil.copytree(sft / "exports/step_00000004", teacher)
    up("on_policy_distillation", distilled, 3, f'teacher.path="{teacher}"')
    up("on_policy_distillation", distilled, 4, f'teacher.path="{teacher}"')
    check(sft, distilled, 4)
    shutil.copy(sft / "model/model.safetensors", teacher / "model.safetensors")
    (teacher / "checksums.json").unlink()  # as its refusal tells who has changed the model
    config = str(RECIPES / "on_policy_distillation.toml")
    refused = tether(
        "up", config, "--run-dir", str(distilled), "--steps", "5", "--set", f'teacher.path="{teacher}"'
    )
    assert refused.returncode == 2
    assert "setting teacher.path: the model in" in refused.stderr
    assert len(series(distilled, "loss")) == 4


@pytest.mark.slow
def test_the_recipes_learn(tmp_path: Path) -> None:
    sft, distilled = tmp_path / "sft", tmp_path / "distilled"
    up("sft", sft, 30)
    up("on_policy_distillation", distilled, 30, f'teacher.path="{sft / "exports/step_00000030"}"')
    check(sft, distilled, 30)
    kl, rewards = series(distilled, "teacher_kl_k1"), series(distilled, "reward_mean")
    assert sum(kl[-5:]) < sum(kl[:5]) / 2
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
