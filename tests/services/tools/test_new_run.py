"""Tests what `tether init` writes."""

import json
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from rollout.prompts.registry import make_source
from services.settings.load import load_settings
from services.tools.new_run import write_run


def test_a_new_run_has_settings_a_reward_and_prompts(tmp_path: Path) -> None:
    assert write_run(tmp_path / "a/b") == ["config.toml", "my_reward.py", "prompts.jsonl"]
    settings = load_settings(str(tmp_path / "a/b/config.toml"), environ={})
    assert settings.run_dir == tmp_path / "a/b/run"
    assert settings.run.modules == (str(tmp_path / "a/b"),)
    source = make_source(settings.prompts)
    prompt = source.at(0)
    assert prompt.metadata["answer"] == max(prompt.text.removesuffix("="))
    assert len(source.held_out()) == 200


def test_every_key_of_the_settings_is_known_and_most_are_explained(tmp_path: Path) -> None:
    write_run(tmp_path)
    lines = (tmp_path / "config.toml").read_text().splitlines()
    keys = [line for line in lines if " = " in line and not line.startswith("#")]
    assert len([line for line in keys if "  #" in line or " # " in line]) > 0.7 * len(keys)


def test_the_same_prompts_are_written_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name)
    one, two = ((tmp_path / name / "prompts.jsonl").read_text() for name in ("one", "two"))
    assert one == two
    assert len({json.loads(line)["prompt"] for line in one.splitlines()}) == 1000


def test_a_directory_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(SettingsError, match="is not empty, it has mine"):
        write_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(SettingsError, match="mine: File exists"):
        write_run(tmp_path / "mine")
