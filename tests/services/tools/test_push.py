"""Tests the upload of an export with the hub's own client, to a hub on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from protocol.errors import SettingsError
from services.cli import app
from services.tools.push import push_export
from tests.hub_server import HubServer, files_of
from trainer.storage.checksums import write_checksums

NAME = "some-org/trained"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(writers={"hf_token"}).serving() as server:
        server.use(monkeypatch, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        yield server


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step in ("step_00000010", "step_00000020", "adapter_step_00000020"):
        directory = tmp_path / "run" / "exports" / step
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(step.encode())
        write_checksums(directory)
    return tmp_path / "run"


def test_the_newest_export_is_one_commit_and_another_follows_by_name(hub: HubServer, run_dir: Path) -> None:
    answer = CliRunner().invoke(app, ["push", str(run_dir), NAME])
    assert answer.exit_code == 0, answer.exception
    repository = hub.repository("model", NAME)
    sha = repository.branches["main"]
    assert repository.commits[sha] == files_of(run_dir / "exports" / "step_00000020")
    assert answer.output == f"step_00000020 is at {hub.url}/{NAME}/commit/{sha}\n"
    assert hub.private == {NAME}
    push_export(run_dir, NAME, "adapter_step_00000020", "adapter", True)
    pushed = repository.commits[repository.branches["adapter"]]
    assert pushed["model.safetensors"] == b"adapter_step_00000020"
    assert repository.branches["main"] == sha


@pytest.mark.parametrize("name", ["best", "adapter_best"])
def test_the_best_model_and_its_adapter_are_pushed_by_the_name_of_their_link(
    hub: HubServer, run_dir: Path, name: str
) -> None:
    (run_dir / "exports" / name).symlink_to("step_00000010")
    assert push_export(run_dir, NAME, name, "", True).startswith("step_00000010 is at ")
    repository = hub.repository("model", NAME)
    assert repository.commits[repository.branches["main"]] == files_of(run_dir / "exports" / "step_00000010")


@pytest.mark.parametrize(
    ("name", "export", "says"),
    [
        ("trained", "", "'trained' is not OWNER/NAME"),
        (NAME, "best", "no export best in .*there are: adapter_step_00000020, step_00000010, step_00000020"),
    ],
)
def test_an_export_that_is_not_there_is_refused(run_dir: Path, name: str, export: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        push_export(run_dir, name, export, "", True)


def test_a_damaged_export_stays_here(hub: HubServer, run_dir: Path) -> None:
    (run_dir / "exports" / "step_00000020" / "model.safetensors").write_bytes(b"xtep_00000020")
    with pytest.raises(SettingsError, match=r"model.safetensors is damaged"):
        push_export(run_dir, NAME, "", "", True)
    assert hub.requests == []


def test_a_hub_that_refuses_says_how_to_log_in(
    hub: HubServer, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(SettingsError, match=r"was not uploaded to .*some-org/trained: .*HF_TOKEN"):
        push_export(run_dir, NAME, "", "", True)
