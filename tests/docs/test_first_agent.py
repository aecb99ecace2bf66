"""Runs docs/first_agent.md as it is written: a model learns the game of an agent."""

import json
import re
from pathlib import Path

import pytest

from tests.docs.pages import begin, blocks, follow
from tests.integration.command import tether_here

PAGE = "first_agent.md"


def test_configuration_of_the_page_passes_the_check(tmp_path: Path) -> None:
    (tmp_path / "my-agent").mkdir()
    (tmp_path / "my-agent/prompts.jsonl").write_text('{"prompt": "?", "answer": "3"}\n')
    begin(PAGE, tmp_path)
    done = tether_here("check", tmp_path / "my-agent/config.toml")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "OK"), done.stdout + done.stderr


def test_every_block_is_a_file_or_is_run() -> None:
    found = list(blocks(PAGE))
    assert [name for _, name, _ in found if name] == ["my-agent/hidden_digit.py", "my-agent/config.toml"]
    assert {language for language, name, _ in found if not name} == {"bash"}


@pytest.mark.slow
def test_the_model_learns_the_game_as_the_page_says(tmp_path: Path) -> None:
    printed = follow(PAGE, tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "my-agent/run/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 40
    assert steps[0]["reward_mean"] < 0.3
    assert steps[-1]["reward_mean"] > 0.5
    assert re.search(r"steps 40 .*violations 0", printed)
