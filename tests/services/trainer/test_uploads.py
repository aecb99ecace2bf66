"""Tests what the trainer copies elsewhere, also while the remote directory fails, and what is held for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.observability.metrics import Metrics
from services.runtime.run_copies import fetch_run
from services.settings.load import load_settings
from services.trainer import uploads
from services.trainer.uploads import Uploader
from trainer.storage.checkpoints import Checkpoints
from trainer.storage.remote import RemoteDirectory
from trainer.storage.spool import Spool


class Run:
    """A run directory with a spool, an event log and checkpoints."""

    def __init__(self, root: Path, remote: str) -> None:
        self.directory = root / "run"
        self.spool = Spool(self.directory / "spool.sqlite")
        self.checkpoints = Checkpoints(self.directory / "checkpoints", keep=1)
        self.metrics = Metrics("trainer")
        self.url = remote
        self.uploader = Uploader(remote, self.directory, self.checkpoints, 2, self.metrics)

    def save(self, version: int) -> None:
        with (self.directory / "audit.jsonl").open("a") as log:
            log.write(f'{{"seq":{version}}}\n{{"half')
        (self.directory / "settings.json").write_text("{}")
        self.spool.put_many([(version, "a", b"record")])
        (self.checkpoints.begin(version) / "part").write_text(f"weights {version}")
        self.checkpoints.finish(version, epoch="e", digest=version, sequence=version)
        self.uploader.put(version, self.spool, self.directory / f"exports/step_{version:08d}")

    def counted(self, event: str) -> float:
        return self.metrics.registry.get_sample_value("tether_events_total", {"event": event}) or 0.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(uploads, "PAUSE_S", 0.001)
    made = Run(tmp_path, f"file://{tmp_path}/elsewhere/remote")
    yield made
    made.uploader.close()
    made.spool.close()


def test_a_copy_is_a_whole_run(run: Run, tmp_path: Path) -> None:
    run.save(1)
    run.uploader.finish()
    assert run.counted("remote.copied") == 1
    assert not run.checkpoints.held
    assert list((run.directory / "uploads").iterdir()) == []
    again = tmp_path / "again"
    settings = load_settings(None, [f"run.dir={again}", f"run.remote={run.url}"], environ={})
    assert fetch_run(settings) == f"fetched version 1 of the run from {run.url}"
    assert (again / "audit.jsonl").read_text() == '{"seq":1}\n'
    assert Checkpoints(again / "checkpoints", keep=1).latest() is not None
    spool = Spool(again / "spool.sqlite")
    assert spool.get_many([(1, "a")]) == [b"record"]
    spool.close()
    assert fetch_run(settings) == ""  # there is a run now
    (again / "fetching").touch()  # as if it had been cut off
    assert fetch_run(settings).startswith("fetched version 1")


def test_a_run_goes_on_while_its_remote_directory_fails(run: Run, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("no directory")
    run.save(1)
    run.uploader.finish()
    (warning,) = run.uploader.warnings()
    assert warning.startswith(f"the checkpoint of version 1 was not copied: {run.url} cannot be written")
    assert run.uploader.warnings() == ()
    assert (run.counted("remote.failed"), run.counted("remote.copied")) == (1, 0)
    (tmp_path / "elsewhere").unlink()
    run.save(2)
    run.uploader.finish()
    assert run.counted("remote.copied") == 1
    assert RemoteDirectory(run.url).versions() == [2]


def test_waiting_upload_is_not_pruned_and_gives_way_to_a_newer_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PAUSE_S", 30.0)
    (tmp_path / "elsewhere").write_text("no directory")
    run.save(1)
    with run.uploader._changed:
        assert run.uploader._changed.wait_for(lambda: run.uploader._copying, 60)
    run.save(2)
    run.save(3)
    assert run.checkpoints.held == {1, 3}
    assert run.checkpoints.complete()[0].version == 1  # of which one is kept, were it not held
    assert run.counted("remote.skipped") == 1
    run.uploader.close()  # does not wait for what is between two attempts
    run.uploader._thread.join(10)
    assert not run.uploader._thread.is_alive()
    assert run.counted("remote.failed") == 1
