"""Tests copies in a remote directory: which are complete, kept and fetched, also if writes fail half-way."""

import errno
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from protocol.errors import SettingsError
from trainer.storage.remote import COMPLETE, DamagedCopy, RemoteDirectory, RemoteError


class FullDisk(LocalFileSystem):  # type: ignore[misc]
    """The local files, on a disk that is full after some of them."""

    protocol = "fulldisk"
    cachable = False
    room = 0

    def put_file(self, lpath: str, rpath: str, *args: Any, **options: Any) -> None:
        if FullDisk.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        FullDisk.room -= 1
        super().put_file(lpath, rpath, *args, **options)

    def pipe_file(self, path: str, value: bytes, *args: Any, **options: Any) -> None:
        super().pipe_file(path, value if FullDisk.room > 0 else b"", *args, **options)
        if FullDisk.room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")


fsspec.register_implementation("fulldisk", FullDisk, clobber=True)


@pytest.fixture(params=["memory", "file"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteDirectory:
    url = f"memory://{uuid4().hex}/run" if request.param == "memory" else f"file://{tmp_path}/remote/run"
    return RemoteDirectory(url)


def files_of(directory: Path, text: str = "weights") -> dict[str, Path]:
    directory.mkdir(parents=True, exist_ok=True)
    names = (
        "checkpoint/rank-00000.safetensors",
        "checkpoint/manifest.json",
        "checkpoint/critic/rank",
        "run/audit.jsonl",
    )
    files = {name: directory / name.replace("/", "-") for name in names}
    for name, path in files.items():
        path.write_text(f"{text} of {name}")
    return files


def test_uploaded_files_are_downloaded(remote: RemoteDirectory, tmp_path: Path) -> None:
    assert remote.versions() == []
    for version in (8, 20):
        remote.upload(version, files_of(tmp_path / "local", f"weights {version}"))
    assert remote.versions() == [8, 20]
    checkpoint, run = tmp_path / "new/checkpoint", tmp_path / "new"
    run.mkdir()
    remote.download(20, {"checkpoint": checkpoint, "run": run})
    found = sorted(path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*"))
    assert found == ["critic", "critic/rank", "manifest.json", "rank-00000.safetensors"]
    assert (checkpoint / "critic/rank").read_text() == "weights 20 of checkpoint/critic/rank"
    assert (run / "audit.jsonl").read_text() == "weights 20 of run/audit.jsonl"
    remote.upload(20, files_of(tmp_path / "local", "other"))
    remote.download(20, {"run": run})
    assert (run / "audit.jsonl").read_text() == "other of run/audit.jsonl"


def test_a_download_that_was_cut_off_is_made_again(remote: RemoteDirectory, tmp_path: Path) -> None:
    remote.upload(8, files_of(tmp_path / "local"))
    for _ in range(2):  # of the first one the run's own files are missing, say
        remote.download(8, {"checkpoint": tmp_path / "new"})
    assert (tmp_path / "new/critic/rank").read_text() == "weights of checkpoint/critic/rank"


def test_the_newest_copies_are_kept_and_their_exports(remote: RemoteDirectory, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        export = tmp_path / f"step_{version:08d}"
        (export / "inner").mkdir(parents=True)
        (export / "inner/model").write_text("weights")
        remote.upload_export(export)
        remote.upload(version, files_of(tmp_path / "local"))
        remote.prune(2, version)
    assert remote.versions() == [2, 3]
    fs, root = fsspec.core.url_to_fs(remote.url)
    fs.invalidate_cache()
    exports = [path.rsplit("/", 1)[1] for path in fs.ls(f"{root}/exports", detail=False)]
    assert sorted(exports) == ["step_00000002", "step_00000003"]
    assert fs.cat_file(f"{root}/exports/step_00000003/inner/model") == b"weights"


def test_a_newer_copy_that_was_left_out_takes_no_place_of_a_kept_one(
    remote: RemoteDirectory, tmp_path: Path
) -> None:
    for version in (2, 4):
        remote.upload(version, files_of(tmp_path / "local"))
    remote.upload(3, files_of(tmp_path / "local"))  # of a run that goes on from 2, as 4 is damaged
    remote.prune(1, 3)
    assert remote.versions() == [3, 4]


def test_a_damaged_file_is_named_and_nothing_is_left(remote: RemoteDirectory, tmp_path: Path) -> None:
    remote.upload(4, files_of(tmp_path / "local"))
    remote.check(4)
    fs, root = fsspec.core.url_to_fs(remote.url)
    fs.pipe_file(f"{root}/step_00000004/checkpoint/rank-00000.safetensors", b"noise")
    with pytest.raises(DamagedCopy, match=r"rank-00000\.safetensors is damaged"):
        remote.check(4)
    with pytest.raises(RemoteError, match=r"rank-00000\.safetensors is damaged"):
        remote.download(4, {"checkpoint": tmp_path / "here"})
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("room", [0, 1, 2, 4])
def test_half_a_copy_counts_as_nothing_and_is_replaced(tmp_path: Path, room: int) -> None:
    remote = RemoteDirectory(f"fulldisk://{tmp_path}/remote")
    FullDisk.room = 5
    remote.upload(1, files_of(tmp_path / "local"))
    FullDisk.room = room
    with pytest.raises(RemoteError, match=r"fulldisk://.* cannot be written: .*No space left on device"):
        remote.upload(2, files_of(tmp_path / "local", "newer"))
    assert remote.versions() == [1]
    FullDisk.room = 5
    remote.upload(2, files_of(tmp_path / "local", "newer"))
    assert remote.versions() == [1, 2]
    FullDisk.room = 1  # a version that is made again replaces the complete one only when it is complete
    with pytest.raises(RemoteError):
        remote.upload(2, files_of(tmp_path / "local", "newest"))
    assert remote.versions() == [1]
    assert not (tmp_path / "remote/step_00000002" / COMPLETE).exists()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("s3://bucket/run", "Install s3fs"),
        ("nothing://x", "Protocol not known: nothing"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_what_is_missing(url: str, text: str) -> None:
    with pytest.raises(SettingsError, match=rf"setting run\.remote: {url}: .*{text}"):
        RemoteDirectory(url)
