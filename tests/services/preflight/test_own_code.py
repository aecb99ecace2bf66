"""Tests that code of the user is loaded and tried before anything starts, each kind by its setting."""

from pathlib import Path

import pytest

from rollout.prompts.base import Prompt
from services.preflight.own_code import own_code_problems
from services.settings.load import load_settings

MODULE = """
import torch
from trainer.algorithms.grpo import Grpo

class Good(Grpo): ...

class Bad(Grpo):
    def advantages(self, rewards, group_index):
        return rewards / 0

def keep(rewards): return True
def keep_no(rewards): return rewards
def rate(update, config): return config.lr
def rate_no(update, config): return 1 / (99 - update)

class OfSix(Grpo):
    def advantages(self, rewards, group_index):
        assert group_index.bincount().tolist() == [6, 6, 6]
        return super().advantages(rewards, group_index)

def keep_by_all(rewards, components, prompt, metadata):
    assert (prompt, metadata["answer"]) == ("1+1=", "2")
    return components["right"] == components["environment"] == rewards

def keep_six(rewards): return bool(1 / (len(rewards) == 6))
"""
GOOD = (
    "algorithm.name=own_code_of_test:Good", "algorithm.filter_groups=true",
    "algorithm.group_filter=own_code_of_test:keep", "optimizer.lr_decay_style=own_code_of_test:rate",
    "optimizer.name=torch.optim:SGD", "optimizer.options={momentum=0.9}", "trainer.backend=reference",
)  # fmt: skip


def problems(*overrides: str) -> list[str]:
    settings = load_settings(None, [*GOOD, *overrides], environ={})
    prompts = [Prompt("1+1=", metadata={"answer": "2"}, index=0)]
    return [str(problem) for problem in own_code_problems(settings, prompts)]


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_code_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_code_of_the_user_that_works_has_no_problem() -> None:
    assert problems() == []


def test_code_of_the_user_is_tried_with_the_samples_that_are_kept() -> None:
    own = "algorithm.name=own_code_of_test:OfSix", "algorithm.group_filter=own_code_of_test:keep_six"
    begun = "sampling.samples_per_prompt=8"
    assert problems(*own, begun, "sampling.keep_first=6") == []
    assert len(problems(*own, begun)) == 2


def test_a_filter_is_tried_on_the_first_prompt_with_a_component_of_each_verifier() -> None:
    own = "algorithm.group_filter=own_code_of_test:keep_by_all", "environment.name=gsm8k"
    assert problems(*own, 'reward.verifiers=[{name="exact_match", label="right"}]') == []
    (text,) = problems(*own, 'reward.verifiers=[{name="exact_match"}]')
    assert "KeyError: 'right'" in text


def test_code_that_fails_is_named_all_of_it_at_once() -> None:
    algorithm, filter_, schedule, optimizer, engine = problems(
        "algorithm.name=own_code_of_test:Bad", "algorithm.group_filter=own_code_of_test:keep_no",
        "optimizer.lr_decay_style=own_code_of_test:rate_no", "optimizer.options={momentum=-1}",
        "engine.name=own_code_of_test:Good",
    )  # fmt: skip
    assert "advantages() has inf for sample 0" in algorithm
    assert filter_.startswith("setting algorithm.group_filter: own_code_of_test:keep_no in /")
    assert "raised for update 99 at" in schedule
    assert schedule.endswith("own_code_of_test.py:14: ZeroDivisionError: division by zero")
    assert "Invalid momentum value: -1" in optimizer
    assert "is not a subclass of rollout.engines.base.Engine" in engine
