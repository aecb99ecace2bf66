"""Tests the numbers of `tether eval`: gains with their errors, the best constant answer, and the text."""

from pathlib import Path

import pytest

from protocol.errors import SettingsError
from reward.config import RewardConfig
from reward.workers.pool import ScorePool
from rollout.prompts.base import Prompt
from services.tools.evaluate import (
    add_gains,
    best_constant,
    load_model,
    newest_export,
    paired_difference,
    render_scores,
)


def test_paired_difference_is_the_mean_and_its_standard_error() -> None:
    mean, stderr = paired_difference([1.0, 3.0, 2.0], [0.0, 1.0, 2.0])
    assert mean == pytest.approx(1.0)
    assert stderr == pytest.approx((1.0 / 3) ** 0.5)  # differences 1, 2, 0: variance 1


def test_add_gains_compares_with_the_first_model() -> None:
    scored = [
        {"model": "a", "greedy": 0.0, "greedy_each": [0.0, 0.0]},
        {"model": "b", "greedy": 0.5, "greedy_each": [1.0, 0.0]},
    ]
    add_gains(scored)
    assert scored[0] == {"model": "a", "greedy": 0.0}
    assert scored[1] == {"model": "b", "greedy": 0.5, "greedy_gain": 0.5, "greedy_gain_stderr": 0.5}


def test_render_scores_names_each_model_with_its_gain() -> None:
    models = [
        {"model": "a", "greedy": 0.25, "sampled": 0.5},
        {"model": "b", "greedy": 0.75, "greedy_gain": 0.5, "greedy_gain_stderr": 0.125},
    ]
    assert render_scores({"prompts": 8, "best_constant": 0.1, "models": models}).splitlines() == [
        "held-out prompts: 8, best constant answer: 0.100",
        "a: greedy 0.250, sampled 0.500",
        "b: greedy 0.750, greedy gain +0.500 (standard error 0.125)",
    ]


async def test_best_constant_is_the_reward_of_the_most_frequent_answer() -> None:
    prompts = [Prompt(text=f"{n}=", metadata={"answer": answer}) for n, answer in enumerate("1121")]
    async with ScorePool(RewardConfig(workers=1)) as pool:
        assert await best_constant(pool, prompts) == pytest.approx(0.75)
        assert await best_constant(pool, [Prompt(text="no answer")]) == 0.0


def test_newest_export_is_the_one_with_the_highest_step(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no exported checkpoint"):
        newest_export(tmp_path)
    for name in ("step_00000010", "step_00000020", "step_00000030.tmp"):
        (tmp_path / "exports" / name).mkdir(parents=True)
    assert newest_export(tmp_path).name == "step_00000020"


def test_a_directory_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no safetensors in"):
        load_model(tmp_path)
