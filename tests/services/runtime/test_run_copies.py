"""Tests that a run which is fetched to an empty directory keeps what was chosen for it at its first start."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from services.observability.metrics import Metrics
from services.prepare import prepare_run
from services.runtime.frozen_models import checked_digests, record_digests
from services.runtime.run_copies import settings_of_fetched
from services.settings.hub import pin_names, record_pins
from services.settings.load import FILE, dump_settings, load_settings
from services.settings.sections import Settings
from services.trainer.uploads import RemoteRun, Uploader
from tests.data_sets import write_model
from tests.hub_server import HubServer, files_of
from tests.integration.command import tether_here
from trainer.storage.checkpoints import Checkpoints
from trainer.storage.remote import RemoteDirectory
from trainer.storage.spool import Spool

MODEL = "some-org/tiny"
OTHER = {"float32": "bfloat16", "bfloat16": "float32"}


class Place:
    """A run on one host that is copied, and the empty directory of another host."""

    def __init__(self, root: Path) -> None:
        self.root, self.first, self.second = root, root / "first", root / "second"
        self.config = root / "run.toml"
        self.config.write_text(
            f'[run]\nname = "r"\nremote = "file://{root}/remote"\n[ledger]\nurl = "redis://127.0.0.1:1/0"\n'
            f'[model]\npath = "{MODEL}"\n[teacher]\npath = "{root}/teacher"\n'
        )
        write_model(root / "teacher")

    def compose(self, run_dir: Path, *overrides: str) -> Settings:
        return load_settings(str(self.config), [f'run.dir="{run_dir}"', *overrides], environ={})

    def start_first(self, *overrides: str) -> Settings:
        """Do what a start does, but for the ledger; then copy the run as its trainer does."""
        asked = self.compose(self.first, *overrides)
        self.first.mkdir()
        pinned = pin_names(asked)
        dump_settings(pinned, self.first / FILE)
        record_digests(self.first, checked_digests(pinned))
        record_pins(asked, pinned)
        self.copy_first(asked.run.remote)
        return pinned

    def copy_first(self, remote: str) -> None:
        checkpoints, spool = Checkpoints(self.first / "checkpoints", keep=1), Spool(self.first / "s.sqlite")
        (checkpoints.begin(1) / "part").write_text("weights")
        checkpoints.finish(1, epoch="e", digest=1, sequence=1)
        to = RemoteRun(RemoteDirectory(remote), self.first, 2)
        uploader = Uploader(to, self.first, checkpoints.held, Metrics("trainer"))
        uploader.put(1, spool, self.first / "exports/step_00000001")
        uploader.finish()
        uploader.close()
        spool.close()

    def fetch(self, *overrides: str) -> Settings:
        """Settings of a start in the empty directory."""
        compose = lambda: self.compose(self.second, *overrides)  # noqa: E731
        return settings_of_fetched(compose(), compose)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer().serving() as server:
        server.use(monkeypatch, tmp_path / "cache")
        server.repository("model", MODEL).commit(files_of(write_model(tmp_path / "tiny")))
        yield server


@pytest.fixture
def place(hub: HubServer, tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_branch_that_has_moved_stays_at_the_commit_of_the_first_start(hub: HubServer, place: Place) -> None:
    pinned = place.start_first()
    hub.repository("model", MODEL).commit({"config.json": b"another model"})
    assert pin_names(place.fetch()).model.revision == pinned.model.revision


def test_every_start_pins_names_after_the_fetch(hub: HubServer, place: Place) -> None:
    """It is refused for the one setting that was changed; were the branch resolved anew, for that too."""
    place.start_first()
    hub.repository("model", MODEL).commit({"config.json": b"another model"})
    compose = lambda: place.compose(place.second, "trainer.seed=5")  # noqa: E731
    with pytest.raises(SettingsError, match=r"^setting trainer\.seed is 0 in the run and 5 now") as caught:
        asyncio.run(prepare_run(compose(), compose))
    assert "model.revision" not in str(caught.value)
    result = tether_here(
        "up", place.config, "--run-dir", place.root / "third", "--set", "trainer.seed=5"
    )  # fmt: skip
    assert result.returncode == 2, result.stderr
    assert "fetched version 1 of the run" in result.stderr
    assert "setting trainer.seed is 0 in the run and 5 now" in result.stderr
    assert "model.revision" not in result.stderr


def test_a_data_type_that_was_chosen_on_another_machine_stays(place: Place) -> None:
    here = place.compose(place.second).trainer.dtype
    place.start_first(f"trainer.dtype={OTHER[here]}")
    assert place.fetch().trainer.dtype == OTHER[here]


def test_models_that_are_not_trained_are_compared_on_another_host(place: Place) -> None:
    place.start_first()
    fetched = pin_names(place.fetch())
    assert set(checked_digests(fetched)) == {"teacher"}
    (place.root / "teacher/config.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"setting teacher\.path: the model in .* has the digest"):
        checked_digests(fetched)


def test_a_directory_with_a_run_is_left_as_it_is(place: Place) -> None:
    place.start_first()
    settings = place.compose(place.first)
    assert settings_of_fetched(settings, pytest.fail) is settings  # type: ignore[arg-type]
