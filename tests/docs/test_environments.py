"""Runs what docs/environments.md shows, and the page as it is written; checks its other settings."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from protocol.validation import validated
from rollout.config import EnvironmentConfig
from rollout.environments import gsm8k, tools
from rollout.environments.third_party import openenv, textarena
from rollout.prompts.base import PromptConfig
from rollout.prompts.registry import make_source
from tests.changes import PAGES, slow_unless_changed
from tests.docs.pages import begin, blocks, follow
from tests.integration.command import tether

PAGE = "environments.md"


def check_run(run_dir: Path) -> None:
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [step["version"] for step in steps] == [1, 2, 3]
    assert all(0 < step["reward_mean"] < 1 for step in steps)


@slow_unless_changed(*PAGES, "rollout/environments/")
def test_run_with_the_environments_of_the_page_is_trained(tmp_path: Path) -> None:
    begin(PAGE, tmp_path)
    config, run_dir = str(tmp_path / "my-game/game.toml"), tmp_path / "my-game/game"
    other = ("--set", "environment.name=my_class:Game")
    for words in (
        ("check", config),
        ("check", config, *other),
        ("up", config, "--steps", "3"),
        ("verify", str(run_dir)),
    ):
        done = tether(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    check_run(run_dir)
    assert re.search(r"steps 3 .*violations 0", done.stdout)


@slow_unless_changed(f"docs/{PAGE}", *PAGES)
def test_an_environment_of_ones_own_is_trained_as_written(tmp_path: Path) -> None:
    printed = follow(PAGE, tmp_path)
    check_run(tmp_path / "my-game/game")
    assert re.search(r"steps 3 .*violations 0", printed)


def test_an_environment_of_ones_own_is_short() -> None:
    (text,) = [text for _, name, text in blocks(PAGE) if name.endswith("my_game.py")]
    assert len(text.splitlines()) <= 20


@pytest.mark.parametrize(
    "table", [text for language, name, text in blocks(PAGE) if language == "toml" and not name]
)
def test_settings_of_shipped_environments_are_right(table: str) -> None:
    sections = tomllib.loads(table)
    config = validated(EnvironmentConfig, sections["environment"])
    kinds = {
        "gsm8k": gsm8k.Options,
        "openenv": openenv.Options,
        "textarena": textarena.Options,
        "tools": tools.Options,
    }
    validated(kinds[config.name], config.options)
    if "families" in (prompts := sections.get("prompts", {})):
        source = make_source(PromptConfig(**{**prompts, "families": tuple(prompts["families"])}))
        assert {source.at(index).metadata["game"] for index in range(3)} == set(prompts["families"])
