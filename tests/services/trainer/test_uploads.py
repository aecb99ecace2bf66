"""Tests what the trainer copies elsewhere, also while the remote directory fails, and what is held for it."""

import errno
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from huggingface_hub import close_session, get_session

from protocol.host import hub as hub_client
from services.observability.metrics import Metrics
from services.runtime.run_copies import describe_copies, fetch_run
from services.settings.load import load_settings
from services.trainer import uploads
from services.trainer.uploads import HubModel, RemoteRun, Uploader
from tests.hub_server import HubServer, files_of
from tests.small_disks import small_disk
from trainer.storage.checkpoints import Checkpoints
from trainer.storage.remote import RemoteDirectory, RemoteError
from trainer.storage.spool import Spool


class Run:
    """A run directory with a spool, an event log and checkpoints."""

    def __init__(self, root: Path, remote: str, keep: int = 2) -> None:
        self.directory = root / "my run"
        self.spool = Spool(self.directory / "spool.sqlite")
        self.checkpoints = Checkpoints(self.directory / "checkpoints", keep=1)
        self.metrics = Metrics("trainer")
        self.url = remote
        to = RemoteRun(RemoteDirectory(remote), self.directory, keep)
        self.uploader = Uploader(to, self.directory, self.checkpoints.held, self.metrics)

    def save(self, version: int, nbytes: int = 0) -> None:
        with (self.directory / "audit.jsonl").open("a") as log:
            log.write(f'{{"seq":{version}}}\n{{"half')
        (self.directory / "settings.json").write_text("{}")
        self.spool.put_many([(version, "a", b"record")])
        (self.checkpoints.begin(version) / "part").write_text(f"weights {version}" + " " * nbytes)
        self.checkpoints.finish(version, epoch="e", digest=version, sequence=version)
        self.uploader.put(version, self.spool, self.directory / f"exports/step_{version:08d}")

    def copy(self, *versions: int, nbytes: int = 0) -> None:
        """Save checkpoints, and wait until each is copied or given up."""
        for version in versions:
            self.save(version, nbytes)
            self.uploader.finish()

    def send_to(self, model: str) -> None:
        """Upload exports alone to a model on the hub."""
        self.uploader.close()
        self.uploader = Uploader(HubModel(model, "mine"), self.directory, set(), self.metrics)

    def export(self, version: int) -> Path:
        directory = self.directory / f"exports/step_{version:08d}"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(f'{{"version": {version}}}')
        (directory / "model.safetensors").write_bytes(bytes(range(256)) * version)
        return directory

    def end(self, *overrides: str) -> list[str]:
        """Return what `tether up` says of the copies at the end."""
        words = [f"run.dir={self.directory}", *overrides]
        return list(describe_copies(load_settings(None, words, environ={})))

    def counted(self, event: str) -> float:
        return self.metrics.registry.get_sample_value("tether_events_total", {"event": event}) or 0.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "RETRY_PAUSE_S", 0.001)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, f"file://{tmp_path}/elsewhere/remote")
    yield made
    made.uploader.close()
    made.spool.close()


def test_a_copy_is_a_whole_run(run: Run, tmp_path: Path) -> None:
    (run.directory / "settings_until_7.json").write_text('{"lr": 1}')
    run.copy(1)
    assert run.counted("remote.copied") == 1
    assert not run.checkpoints.held
    assert list((run.directory / "uploads/remote").iterdir()) == []
    assert run.end(f"run.remote={run.url}") == [f"version 1 is at {run.url}"]
    again = tmp_path / "again"
    settings = load_settings(None, [f"run.dir={again}", f"run.remote={run.url}"], environ={})
    assert fetch_run(settings) == f"fetched version 1 of the run from {run.url}"
    assert (again / "audit.jsonl").read_text() == '{"seq":1}\n'
    assert (again / "settings_until_7.json").read_text() == '{"lr": 1}'
    assert Checkpoints(again / "checkpoints", keep=1).latest() is not None
    with closing(Spool(again / "spool.sqlite")) as spool:
        assert spool.get_many([(1, "a")]) == [b"record"]
    assert fetch_run(settings) == ""  # there is a run now
    (again / "fetching").touch()  # as if it had been cut off
    assert fetch_run(settings).startswith("fetched version 1")
    assert list(describe_copies(settings)) == [f"version 1 is at {run.url}"]


@pytest.mark.parametrize(
    ("damaged", "says"),
    [
        ("checkpoint/part", "is damaged: its digest"),
        ("run/spool.sqlite", "is missing"),
        ("complete.json", "is damaged: JSON"),
    ],
)
def test_the_newest_copy_that_is_whole_is_fetched(
    run: Run, tmp_path: Path, damaged: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    run.copy(1, 2)
    newest, new = tmp_path / f"elsewhere/remote/step_00000002/{damaged}", tmp_path / "new"
    (tmp_path / "elsewhere/remote/step_00000001/run/settings.json").rename(tmp_path / "kept")
    newest.unlink() if "missing" in says else newest.write_text("noise")
    settings = load_settings(None, [f"run.dir={new}", f"run.remote={run.url}"], environ={})
    names = rf"version 2: step_00000002/{damaged} {says}.*; version 1: step_00000001/run/settings.json is "
    with pytest.raises(RemoteError, match=rf"^{run.url} has no whole copy: {names}missing$"):
        fetch_run(settings)
    (tmp_path / "kept").rename(tmp_path / "elsewhere/remote/step_00000001/run/settings.json")
    caplog.clear()
    assert fetch_run(settings) == f"fetched version 1 of the run from {run.url}"
    (line,) = caplog.messages
    assert line.startswith(f"remote.left_out version=2 error=step_00000002/{damaged} {says}")
    assert Checkpoints(new / "checkpoints", keep=1).latest() is not None
    assert [path.name for path in (new / "checkpoints").iterdir()] == ["step_00000001"]
    assert not list(tmp_path.glob("*.download*"))


def test_a_fetch_that_was_cut_off_leaves_no_checkpoint_of_a_copy_that_is_damaged_since(
    run: Run, tmp_path: Path
) -> None:
    run.copy(1, 2)
    new, newest = tmp_path / "new", tmp_path / "elsewhere/remote/step_00000002"
    new.mkdir()
    (new / "fetching").touch()  # and killed once the checkpoint was there, before the other files were
    shutil.copytree(newest / "checkpoint", new / "checkpoints/step_00000002")
    (newest / "run/spool.sqlite").write_text("noise")
    settings = load_settings(None, [f"run.dir={new}", f"run.remote={run.url}"], environ={})
    assert fetch_run(settings) == f"fetched version 1 of the run from {run.url}"
    assert [path.name for path in (new / "checkpoints").iterdir()] == ["step_00000001"]


def test_a_run_goes_on_while_its_remote_directory_fails(run: Run, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("no directory")
    run.copy(1)
    (warning,) = run.uploader.warnings()
    assert warning.startswith(f"the checkpoint of version 1 was not copied: {run.url} cannot be written")
    assert run.uploader.warnings() == ()
    assert (run.counted("remote.failed"), run.counted("remote.copied")) == (1, 0)
    assert run.end(f"run.remote={run.url}")[0].startswith(f"warning: version 1 is not at {run.url}: ")
    (tmp_path / "elsewhere").unlink()
    run.copy(2)
    assert run.counted("remote.copied") == 1
    assert RemoteDirectory(run.url).versions() == [2]


def test_a_copy_that_found_no_room_leaves_nothing_that_takes_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.export(1)
    run.copy(1)
    put_file = LocalFileSystem.put_file

    def full(system: LocalFileSystem, source: str, target: str) -> None:
        put_file(system, source, target)
        if target.endswith("manifest.json"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(LocalFileSystem, "put_file", full)
    run.export(2)
    run.copy(2)
    (warning,) = run.uploader.warnings()
    assert "No space left on device" in warning
    remote = tmp_path / "elsewhere/remote"
    assert sorted(path.name for path in remote.rglob("step_*")) == ["step_00000001"] * 2
    assert RemoteDirectory(run.url).versions() == [1]


@contextmanager
def full_place(root: Path, keep: int) -> Iterator[Run]:
    """A run with `keep` copies of 1 MiB, whose place has no room for another."""
    with small_disk(root / "elsewhere", keep * 1200 + 600) as disk:
        run = Run(root, f"file://{disk}/remote", keep)
        run.copy(*range(1, keep + 1), nbytes=1 << 20)
        yield run
        run.uploader.close()
        run.spool.close()


@pytest.mark.parametrize(("keep", "kept"), [(1, [1]), (2, [2, 3]), (3, [2, 3, 4])])
def test_a_full_place_gives_up_its_oldest_copy_but_never_its_last(
    tmp_path: Path, keep: int, kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, left = RemoteDirectory._remove, []

    def noted(directory: RemoteDirectory, path: str) -> None:
        remove(directory, path)
        left.append(len(directory.versions()))

    with full_place(tmp_path, keep) as run:
        monkeypatch.setattr(RemoteDirectory, "_remove", noted)
        run.copy(keep + 1, nbytes=1 << 20)
        assert RemoteDirectory(run.url).versions() == kept
        warnings = run.uploader.warnings()
    assert min(left) == max(1, keep - 1)
    assert [f"of version {keep + 1} was not copied" in line for line in warnings] == [True] * (keep == 1)


@pytest.mark.parametrize(("damaged", "kept"), [((3,), [1, 2, 4]), ((2, 3), [1, 4]), ((1, 2, 3), [1, 2, 3])])
def test_a_full_place_gives_up_no_whole_copy_for_damaged_ones(
    tmp_path: Path, damaged: tuple[int, ...], kept: list[int]
) -> None:
    with full_place(tmp_path, 3) as run:
        for version in damaged:
            with (tmp_path / f"elsewhere/remote/step_{version:08d}/checkpoint/part").open("r+") as part:
                part.write("noise")
        run.copy(4, nbytes=1 << 20)
        assert RemoteDirectory(run.url).versions() == kept
    assert len(run.uploader.warnings()) == (4 not in kept)


def test_a_copy_that_is_made_again_in_a_full_place_takes_no_place_of_another(tmp_path: Path) -> None:
    with full_place(tmp_path, 2) as run:
        (run.export(2) / "model.safetensors").write_bytes(bytes(1 << 20))
        run.uploader.put(2, run.spool, run.directory / "exports/step_00000002")
        run.uploader.finish()
        assert RemoteDirectory(run.url).versions() == [1, 2]


def test_waiting_upload_is_not_pruned_and_gives_way_to_a_newer_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "RETRY_PAUSE_S", 30.0)
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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(writers={"hf_token"}).serving() as server:
        server.use(monkeypatch, tmp_path / "cache")
        monkeypatch.setenv("HF_TOKEN", "hf_token")
        yield server


def test_each_export_is_a_commit_of_a_model_on_the_hub(run: Run, hub: HubServer) -> None:
    run.send_to("some-org/mine")
    assert run.end("run.hub=some-org/mine") == []
    for version in (1, 2):
        export = run.export(version)
        run.copy(version)
        repository = hub.repository("model", "some-org/mine")
        assert repository.commits[repository.branches["main"]] == files_of(export)
    assert len(repository.commits) == 3  # the first is empty
    assert not run.checkpoints.held
    assert run.uploader.warnings() == ()
    assert run.end("run.hub=some-org/mine") == ["version 2 is at some-org/mine"]


@pytest.mark.parametrize(
    ("refusal", "token", "says"),
    [(0, "hf_another", "HF_TOKEN"), (403, "hf_token", "HF_TOKEN"), (500, "hf_token", "once it answers")],
)
def test_a_hub_that_refuses_costs_the_run_nothing_but_the_upload(
    run: Run, hub: HubServer, refusal: int, token: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    hub.refusal = refusal
    run.send_to("some-org/mine")
    export = run.export(1)
    run.copy(1)
    (warning,) = run.uploader.warnings()
    assert says in warning
    assert f"step_00000001 was not uploaded to {hub.url}/some-org/mine" in warning
    (line,) = run.end("run.hub=some-org/mine")
    assert line.endswith(f"`tether push '{run.directory}' some-org/mine` sends it")
    assert len(files_of(export)) == 2
    assert [checkpoint.version for checkpoint in run.checkpoints.complete()] == [1]
    hub.refusal = 0
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    run.export(2)
    run.copy(2)
    assert run.end("run.hub=some-org/mine") == ["version 2 is at some-org/mine"]


def test_an_upload_that_a_stop_cut_off_is_made_by_the_next_start(run: Run, hub: HubServer) -> None:
    run.send_to("some-org/mine")
    run.export(1)
    run.copy(1)
    hub.refusal = 500
    export = run.export(2)
    with run.uploader._changed:  # as if the process ended before the copy began
        run.save(2)
        run.uploader._is_closed = True
        run.uploader._changed.notify_all()
    run.uploader._thread.join(60)
    (line,) = run.end("run.hub=some-org/mine")
    assert line.startswith("warning: version 2 is not at some-org/mine: not copied yet; ")
    hub.refusal = 0
    run.send_to("some-org/mine")
    run.uploader.resume(2, run.spool, export)
    run.uploader.finish()
    repository = hub.repository("model", "some-org/mine")
    assert repository.commits[repository.branches["main"]] == files_of(export)
    assert run.end("run.hub=some-org/mine") == ["version 2 is at some-org/mine"]
    run.uploader.resume(2, run.spool, export)  # it is there
    run.uploader.resume(3, run.spool, export.with_name("step_00000003"))  # it has no export
    run.uploader.finish()
    assert run.counted("hub.copied") == 2
    assert run.end("run.hub=some-org/other") == []
    run.send_to("some-org/other")
    run.uploader.resume(2, run.spool, export)
    run.uploader.finish()
    assert run.end("run.hub=some-org/other") == ["version 2 is at some-org/other"]


@pytest.fixture
def may_copy(run: Run, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Have copies wait for the event; version 1 is being copied."""
    copy, may_copy = RemoteRun.copy, threading.Event()
    monkeypatch.setattr(RemoteRun, "copy", lambda to, job: may_copy.wait(60) and copy(to, job))
    run.save(1)
    with run.uploader._changed:
        assert run.uploader._changed.wait_for(lambda: run.uploader._copying, 60)
    return may_copy


@pytest.mark.parametrize("again", [0, 1, 2])
def test_a_copy_that_takes_too_long_is_reported_once_and_goes_on(
    run: Run, may_copy: threading.Event, again: int
) -> None:
    run.uploader._late_from_s = -1.0
    (warning,) = run.uploader.warnings()
    assert warning.startswith("the checkpoint of version 1 was not copied: it has taken ")
    assert run.uploader.warnings() == ()
    assert run.end(f"run.remote={run.url}")[0].startswith("warning: version 1 is not at ")
    for _ in range(again):  # as after an export that found no room: one copy waits for the other
        run.uploader.put(1, run.spool, run.directory / "exports/none")
        assert run.checkpoints.held == {1}
    may_copy.set()
    run.uploader.finish()
    assert run.uploader.warnings() == ()
    assert (run.counted("remote.failed"), run.counted("remote.copied")) == (1, 1 + bool(again))
    assert run.end(f"run.remote={run.url}") == [f"version 1 is at {run.url}"]
    RemoteDirectory(run.url).check(1)
    assert not run.checkpoints.held


def test_an_older_copy_that_is_complete_does_not_hide_that_a_newer_one_waits(
    run: Run, may_copy: threading.Event
) -> None:
    with run.uploader._changed:
        run.save(2)
        run.uploader._is_closed = True  # the process ends when the first is copied
    may_copy.set()
    run.uploader._thread.join(60)
    assert run.counted("remote.copied") == 1
    (line,) = run.end(f"run.remote={run.url}")
    assert line.startswith(f"warning: version 2 is not at {run.url}: not copied yet; ")


def test_a_hub_that_does_not_answer_is_left_after_a_while(
    run: Run, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub.url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        hub.use(monkeypatch, run.directory / "cache")
        monkeypatch.setattr(hub_client, "UPLOAD_TIMEOUT_S", 0.2)
        close_session()  # it is made anew, as the client does after an error
        run.send_to("some-org/mine")
        run.export(1)
        run.copy(1)
    (warning,) = run.uploader.warnings()
    assert "ReadTimeout" in warning
    monkeypatch.undo()
    close_session()
    assert get_session().timeout.read == hub_client.UPLOAD_TIMEOUT_S == 120
