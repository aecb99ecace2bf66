"""Runs the files of docs/own_code.md, and the page as it is written: every part of a run is the user's."""

import json
import re
from pathlib import Path

import pytest

from rollout.prompts.base import Prompt
from services.preflight.own_code import own_code_problems
from services.settings.load import load_settings
from tests.changes import PAGES, slow_unless_changed
from tests.docs.pages import begin, follow
from tests.integration.command import tether

PAGE = "own_code.md"
PARTS = (
    f"docs/{PAGE}",
    "protocol/user_code.py",
    "protocol/choices.py",
    "services/preflight/",
    "services/settings/",
    "trainer/algorithms/",
    "trainer/optimizers/",
    "rollout/prompts/",
    "rollout/engines/registry.py",
    "reward/",
)
"""How the paths begin of what the page's files are parts of."""


def check_run(run_dir: Path) -> None:
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["version"] for step in steps] == [1, 2, 3]
    assert all(0 < step["reward_mean"] < 1 for step in steps)
    assert all(step["skipped"] == "" for step in steps)


@slow_unless_changed(*PARTS, *PAGES)
def test_run_with_the_files_of_the_page_is_trained(tmp_path: Path) -> None:
    begin(PAGE, tmp_path)
    config = str(tmp_path / "mine/own.toml")
    for words in (("check", config), ("up", config, "--steps", "3"), ("verify", str(tmp_path / "mine/own"))):
        done = tether(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    check_run(tmp_path / "mine/own")
    assert re.search(r"steps 3 .*violations 0", done.stdout)


@slow_unless_changed(f"docs/{PAGE}", *PAGES)
def test_a_run_of_ones_own_code_is_trained_as_written(tmp_path: Path) -> None:
    printed = follow(PAGE, tmp_path)
    check_run(tmp_path / "mine/own")
    assert re.search(r"my_loss:Reinforce on a made batch: 24 samples of 3 groups", printed)
    assert re.search(r"my_algorithm:Squashed on step 2 of mine/own: \d+ samples", printed)
    assert printed.count("differences from grpo, at most: advantages ") == 2
    assert re.search(r"\d\d passed", printed)
    assert re.search(r"steps 3 .*violations 0", printed)


def test_the_algorithm_of_its_page_is_tried_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = follow("algorithms.md", tmp_path)
    assert re.search(r"my_algorithm:Kind on a made batch: 24 samples of 3 groups", printed)
    assert "differences from grpo, at most: advantages " in printed
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = load_settings(str(tmp_path / "my_algorithm.toml"), environ={})
    assert [*own_code_problems(settings, [Prompt("1+1=")])] == []
