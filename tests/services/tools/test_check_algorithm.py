"""Tests `tether check-algorithm`: on a recorded batch and on a made one."""

import sys
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from services.tools.check_algorithm import check_algorithm, render_checked_algorithm
from tests.services.monitor.runs import recorded_run

MODULE = """
from dataclasses import dataclass
from trainer.algorithms.grpo import Grpo

@dataclass(frozen=True)
class Mine(Grpo):
    factor: float = 1.0
    def advantages(self, rewards, group_index):
        return self.factor * super().advantages(rewards, group_index)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An algorithm in the working directory, where Python itself does not search."""
    place = tmp_path / "work"
    place.mkdir()
    (place / "algorithm_to_check.py").write_text(MODULE)
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "algorithm_to_check:Mine"


def test_an_own_algorithm_is_tried_on_a_made_batch(mine: str) -> None:
    facts = check_algorithm(mine, like="grpo")
    assert (facts["groups"], facts["batch"]) == (3, "a made batch")
    assert set(facts["differences"].values()) == {0.0}
    assert render_checked_algorithm(facts).endswith("OK")


def test_an_own_algorithm_is_tried_on_a_recorded_step(mine: str, tmp_path: Path) -> None:
    run_dir = recorded_run(tmp_path)
    newest = check_algorithm(mine, run_dir=run_dir)
    assert newest["batch"] == f"step 6 of {run_dir}"
    assert "all advantages are 0" in render_checked_algorithm(newest)
    facts = check_algorithm(
        mine, run_dir=run_dir, step=2, like="grpo", overrides=["algorithm.options.factor=2.0"]
    )
    assert (facts["samples"], facts["batch"]) == (24, f"step 2 of {run_dir}")
    assert facts["differences"]["advantages"] > 0
    assert facts["differences"]["weights"] == 0
    assert "differences from grpo, at most: advantages" in render_checked_algorithm(facts)


def test_made_groups_have_the_samples_that_are_kept() -> None:
    facts = check_algorithm("grpo", overrides=["sampling.samples_per_prompt=8", "sampling.keep_first=6"])
    assert facts["samples"] == 3 * 6


def test_options_of_a_built_in_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"setting algorithm\.options: they are arguments of your own"):
        check_algorithm("grpo", overrides=["algorithm.options.factor=2.0"])
