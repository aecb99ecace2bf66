"""Tests the numbers of `tether eval`: gains with their errors, the best constant answer, and the text."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import SettingsError
from reward.config import RewardConfig
from reward.workers.pool import ScorePool
from rollout.prompts.base import Prompt
from services.evaluation.estimates import PromptScore
from services.evaluation.scoring import SetScores
from services.settings.load import run_settings
from services.tools.evaluate import add_gains, best_constant, redirect_output, render_scores, score_run
from tests.changes import slow_unless_changed
from tests.services.monitor.runs import recorded_run


def greedy(*rewards: float | None) -> SetScores:
    scores = [PromptScore(error="lost") if reward is None else PromptScore((reward,)) for reward in rewards]
    return SetScores(scores, [], 0.0)


def test_add_gains_compares_with_the_first_model() -> None:
    entries: list[dict[str, Any]] = [{"model": "a"}, {"model": "b"}]
    add_gains(entries, [greedy(0.0, 0.0), greedy(1.0, 0.0)])
    assert entries == [{"model": "a"}, {"model": "b", "greedy_gain": 0.5, "greedy_gain_stderr": 0.5}]


def test_gain_is_over_prompts_that_both_models_scored() -> None:
    entries: list[dict[str, Any]] = [{}, {}, {}]
    add_gains(entries, [greedy(0.0, 0.0, None), greedy(1.0, None, 1.0), greedy(None, None, 1.0)])
    assert entries == [{}, {"greedy_gain": 1.0}, {}]


MODELS = [
    {
        "model": "a",
        "n": 8,
        "greedy": 0.25,
        "sampled": 0.5,
        "sampled_stderr": 0.0625,
        "pass_at_k": {"1": 0.5, "2": 0.75},
    },
    {
        "model": "b",
        "n": 7,
        "greedy": 0.75,
        "greedy_gain": 0.5,
        "greedy_gain_stderr": 0.125,
        "failed": 1,
        "error": "e",
    },
]


def test_render_scores_names_each_model_with_its_gain() -> None:
    scored = {"set": "held_out", "prompts": 8, "best_constant": 0.1, "models": MODELS}
    assert render_scores({**scored, "sets": [scored]}).splitlines() == [
        "held-out prompts: 8, best constant answer: 0.100",
        "a: greedy 0.250, sampled 0.500 ± 0.062, pass@2 0.750",
        "b: greedy 0.750, greedy gain +0.500 (standard error 0.125), 1 prompts not scored (e)",
    ]


def test_render_scores_names_each_of_several_sets() -> None:
    sets = [{"set": name, "prompts": 8, "best_constant": 0.1, "models": []} for name in ("math", "code")]
    assert render_scores({"sets": sets}).splitlines() == [
        "held-out set math: 8, best constant answer: 0.100",
        "held-out set code: 8, best constant answer: 0.100",
    ]


def test_render_scores_without_verifiers_name_no_constant_answer() -> None:
    scores = {"sets": [{"set": "held_out", "prompts": 8, "best_constant": None, "models": []}]}
    assert render_scores(scores) == "held-out prompts: 8"


async def test_best_constant_is_the_reward_of_the_most_frequent_answer() -> None:
    prompts = [Prompt(text=f"{n}=", metadata={"answer": answer}) for n, answer in enumerate("1121")]
    async with ScorePool(RewardConfig(workers=1)) as pool:
        assert await best_constant(pool, prompts) == pytest.approx(0.75)
        assert await best_constant(pool, [Prompt(text="no answer")]) == 0.0
    assert await best_constant(None, prompts) is None


PROGRAM = """
import logging, os, subprocess, sys
from pathlib import Path
from services.tools.evaluate import redirect_output

logging.basicConfig(stream=sys.stderr)
print("before")
try:
    with redirect_output(Path(sys.argv[1])):
        print("a library")
        logging.error("a logger")
        os.write(1, b"a foreign function\\n")
        command = "read go; echo a process; echo its error >&2"
        child = subprocess.Popen(command, shell=True, stdin=subprocess.PIPE)
        raise ValueError("in the middle")
except ValueError as error:
    print(error)
child.communicate(b"go\\n")
print("after", file=sys.stderr)
"""


@slow_unless_changed("services/tools/", "services/observability/", "tests/services/tools/")
def test_only_what_is_printed_outside_of_the_block_is_seen(tmp_path: Path) -> None:
    log = tmp_path / "logs/eval.log"
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(log)], capture_output=True, text=True, timeout=60, check=True
    )
    assert (found.stdout, found.stderr) == ("before\nin the middle\n", "after\n")
    said = log.read_text()
    for words in ("a library", "ERROR:root:a logger", "a foreign function", "a process", "its error"):
        assert words in said


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(SettingsError, match=r"logs"), redirect_output(tmp_path / "logs/eval.log"):
        pass


@pytest.mark.parametrize(
    ("given", "reason"), [("missing", "there is no directory {}: "), (".", "{} lacks *.safetensors: ")]
)
def test_a_checkpoint_without_weights_is_refused_before_anything_is_touched(
    given: str, reason: str, tmp_path: Path
) -> None:
    run_dir, checkpoint = recorded_run(tmp_path), tmp_path / given
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SettingsError, match="^" + re.escape(reason.format(checkpoint))):
        score_run(run_settings(run_dir), [checkpoint])
    assert sorted(tmp_path.rglob("*")) == before
