"""The recipes of deploy/examples/recipes: each file is a configuration that starts, runs and learns."""

import statistics
import tomllib
from pathlib import Path

import pytest

from services.run_record.steps import read_steps
from services.tools.check import check_configuration
from tests.integration.command import audit, tether
from tests.integration.loop import ROOT
from trainer.algorithms.registry import ALGORITHMS
from trainer.config import ScratchConfig
from trainer.random_model import build_scratch

RECIPES = sorted((ROOT / "deploy/examples/recipes").glob("*.toml"))
EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=[path.stem for path in RECIPES])
ONE_AFTER_THE_OTHER = ("on_policy_distillation", "sft")
"""The second makes the teacher of the first: `test_frozen_models.py` runs them."""
OF_REWARDS = [path for path in RECIPES if path.stem not in ONE_AFTER_THE_OTHER]


def test_there_is_a_recipe_for_each_algorithm() -> None:
    named = {tomllib.loads(path.read_text())["algorithm"]["name"] for path in RECIPES}
    assert named == set(ALGORITHMS)


@EACH_RECIPE
def test_a_recipe_passes_the_check_and_names_its_source(recipe: Path, tmp_path: Path) -> None:
    given = [f"run.dir={tmp_path / 'run'}"]
    if recipe.stem == "on_policy_distillation":
        teacher = build_scratch(ScratchConfig(vocabulary="0123456789= "), tmp_path / "teacher")
        given.append(f'teacher.path="{teacher}"')
    assert check_configuration(str(recipe), given).problems == []
    comment = [line for line in recipe.read_text().splitlines() if line.startswith("# ")]
    assert any(line.startswith("# Source: ") for line in comment)
    assert any(line.startswith("# Use it ") for line in comment)
    assert f"#   tether up {recipe.relative_to(ROOT)}" in comment


@pytest.mark.slow
@pytest.mark.parametrize("recipe", OF_REWARDS, ids=[path.stem for path in OF_REWARDS])
def test_a_recipe_runs_and_its_reward_rises(recipe: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = tether("up", str(recipe), "--run-dir", str(run_dir), "--set", "monitor.enabled=false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert audit(run_dir)["violations"] == []
    steps = read_steps(run_dir / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(30))
    assert not any(step["skipped"] for step in steps)
    bound = tomllib.loads(recipe.read_text())["bound"]["max_staleness"]
    assert max(step["lag_max"] for step in steps) <= bound
    rewards = [step["reward_mean"] for step in steps]
    assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:5])
