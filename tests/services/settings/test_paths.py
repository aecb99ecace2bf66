"""Tests what the paths among the settings are relative to."""

from pathlib import Path

import pytest

from services.settings.load import dump_settings, load_settings, run_settings
from services.settings.sections import Settings
from tests.integration.loop import ROOT

TABLES = """
[run]
dir = "out"
modules = [".", "/abroad"]
[model]
path = "model"
[prompts]
path = "../data/prompts.jsonl"
[engine]
python = "bin/python"
[[services.pool]]
engine = { name = "sglang", python = "other/python" }
[[services.pool]]
engine = { python = "python3" }
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of a settings file; the working directory is another one."""
    (tmp_path / "configs/model").mkdir(parents=True)
    (tmp_path / "configs/model/config.json").touch()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "configs/run.toml").write_text(TABLES)
    return tmp_path / "configs"


def load(place: Path, *overrides: str, **variables: str) -> Settings:
    return load_settings(str(place / "run.toml"), overrides, environ=variables)


def test_paths_in_a_file_are_relative_to_the_file(place: Path) -> None:
    settings = load(place)
    assert settings.run.dir == f"{place}/out"
    assert settings.run.modules == (str(place), "/abroad")
    assert settings.model.path == f"{place}/model"
    assert settings.prompts.path == f"{place.parent}/data/prompts.jsonl"
    assert settings.engine.python == f"{place}/bin/python"
    assert settings.services.pool[0].engine["python"] == f"{place}/other/python"


def test_an_empty_path_stays_empty_and_a_program_without_a_slash_is_a_name(place: Path) -> None:
    settings = load(place)
    assert (settings.prompts.held_out_path, settings.ledger.ca_file) == ("", "")
    assert settings.services.pool[1].engine["python"] == "python3"


def test_a_name_on_the_hub_stays_a_name_unless_there_is_such_a_directory(place: Path) -> None:
    (place / "run.toml").write_text('[prompts]\npath = "owner/data.set"\nheld_out_path = "./owner/data"\n')
    (place.parent / "work/owner/data.set").mkdir(parents=True)  # where nobody looks for it
    assert load(place).prompts.path == "owner/data.set"
    assert load(place).prompts.held_out_path == f"{place}/owner/data"
    (place / "owner/data.set").mkdir(parents=True)
    assert load(place).prompts.path == f"{place}/owner/data.set"


def test_a_file_that_is_named_by_a_relative_path_is_the_same_file(place: Path) -> None:
    assert load(place) == load_settings("../configs/run.toml", environ={})


def test_paths_of_the_command_line_and_of_variables_are_relative_to_the_working_directory(
    place: Path,
) -> None:
    work = place.parent / "work"
    settings = load(place, "prompts.path=p.jsonl", "run.modules=['.']", TETHER_RUN_DIR="runs/x")
    assert settings.prompts.path == f"{work}/p.jsonl"
    assert settings.run.modules == (str(work),)
    assert settings.run_dir == work / "runs/x"


def test_a_run_without_a_directory_is_in_the_working_directory(place: Path) -> None:
    assert load(place, "run.dir=", "run.name=x").run_dir == place.parent / "work/runs/x"


def test_the_home_directory_can_be_written_as_a_tilde(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert load(place, "prompts.path=~/p.jsonl").prompts.path == "/home/me/p.jsonl"


def test_a_run_keeps_absolute_paths(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(place)
    settings.run_dir.mkdir()
    dump_settings(settings, settings.run_dir / "settings.json")
    monkeypatch.chdir("/")
    assert run_settings(settings.run_dir) == settings


@pytest.mark.parametrize("config", sorted(ROOT.glob("deploy/**/*.toml")), ids=lambda path: path.parent.name)
def test_shipped_configurations_find_their_prompts_from_anywhere(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    made = [name for name in ("smollm2-135m", "runs/") if name in config.read_text()]
    prompts = load_settings(str(config), ["model.path="] if made else [], environ={}).prompts
    path = Path(prompts.path)
    is_made = path.is_relative_to(ROOT / "runs")  # by a command of the example's README
    assert not prompts.path or prompts.source == "hf" or is_made or path.is_file()
