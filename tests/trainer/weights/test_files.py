"""Versions kept as files: their layout, when they are removed, and what a failure leaves."""

import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import msgspec
import pytest
import torch

from protocol.errors import WeightError
from protocol.messages import WeightManifest
from rollout.weights.registry import make_receiver
from tests.trainer.weights.senders import received
from trainer.config import WeightConfig
from trainer.weights.files import FileSender, disk_sender, shm_sender

ROOT = Path(__file__).resolve().parents[3]


def weights(value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [("a", torch.full((1000,), value)), ("b", torch.full((3, 5), value, dtype=torch.bfloat16))]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def shm(directory: Path, **values: int) -> FileSender:
    return shm_sender(WeightConfig(directory=str(directory), bucket_mb=1, **values), "file-test")


def test_shm_files_hold_the_buckets(tmp_path: Path) -> None:
    sender = shm(tmp_path)
    manifest = sender.publish("e1", 12, weights())
    version = tmp_path / "v00000012-e1"
    assert manifest.location == str(version)
    assert names(version) == ["bucket_00000.bin", "manifest.json"]
    assert (version / "bucket_00000.bin").stat().st_size == manifest.buckets[0] == 4032 + 30
    assert names(tmp_path) == ["owner.pid", version.name]
    sender.close()
    assert names(tmp_path) == []


def test_shm_takes_no_more_space_than_the_weights_need(tmp_path: Path) -> None:
    sender = shm_sender(WeightConfig(directory=str(tmp_path), bucket_mb=64), "file-test")
    sender.publish("e1", 1, weights())
    assert (tmp_path / "v00000001-e1" / "bucket_00000.bin").stat().st_blocks * 512 <= 16384
    sender.close()


def test_shm_makes_its_own_directory_in_shared_memory_and_removes_it() -> None:
    first, second = shm_sender(WeightConfig(), "file-test"), shm_sender(WeightConfig(), "file-test")
    assert first.directory != second.directory
    assert first.directory.parent == Path("/dev/shm")
    assert first.directory.name.startswith("tether-file-test-")
    assert (first.directory / "owner.pid").read_text() == str(os.getpid())
    first.close()
    assert not first.directory.exists()
    assert second.directory.exists()
    second.close()


DIE = """
import os, signal, sys, torch
from trainer.config import WeightConfig
from trainer.weights.files import shm_sender
given = zip(sys.argv[1::2], sys.argv[2::2])
senders = [shm_sender(WeightConfig(directory=directory), run) for run, directory in given]
for sender in senders:
    sender.publish("e0", 7, [("a", torch.ones(10))])
    print(sender.directory, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_shm_removes_what_a_dead_trainer_of_the_run_left(tmp_path: Path) -> None:
    arguments = ["dead-test", "", "dead-test-b", "", "dead-test", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(
        [sys.executable, "-c", DIE, *arguments], capture_output=True, text=True, env=environment, check=False
    )
    assert killed.returncode == -9, killed.stderr
    own, other, given = (Path(line) for line in killed.stdout.split())
    assert names(own) == names(other) == names(given) == ["owner.pid", "v00000007-e0"]

    sender = shm_sender(WeightConfig(), "dead-test")
    assert not own.exists()
    assert other.exists()
    sender.close()
    shm_sender(WeightConfig(), "dead-test-b").close()
    assert not other.exists()

    sender = shm_sender(WeightConfig(directory=str(given), bucket_mb=1), "dead-test")
    assert names(given) == ["owner.pid"]
    sender.close()


def test_shm_leaves_the_directory_of_a_live_trainer_alone(tmp_path: Path) -> None:
    sender = shm(tmp_path)
    sender.publish("e1", 1, weights())
    with pytest.raises(WeightError, match=f"belongs to the trainer with pid {os.getpid()}, which is alive"):
        shm(tmp_path)
    assert names(tmp_path) == ["owner.pid", "v00000001-e1"]
    sender.close()


Space = namedtuple("Space", "f_bavail f_frsize")


@pytest.mark.parametrize("transport", ["shm", "disk"])
def test_too_little_space_is_reported_with_numbers_and_leaves_nothing(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WeightConfig(directory=str(tmp_path), bucket_mb=8)
    sender = shm_sender(config, "file-test") if transport == "shm" else disk_sender(config, tmp_path)
    sender.publish("e1", 1, weights())
    before = names(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: Space(3 << 8, 1 << 12))
    big = [("a", torch.zeros(2 << 18)), ("b", torch.zeros(4 << 20))]
    with pytest.raises(WeightError, match=r"has 3 MiB free.* need(s)? 1[68] MiB"):
        sender.publish("e1", 2, big)
    monkeypatch.setattr(os, "statvfs", lambda path: Space(0, 1 << 12))
    with pytest.raises(WeightError, match="has 0 MiB free, the weights need 1 MiB more"):
        sender.publish("e1", 2, [("a", torch.zeros(1 << 10))])
    assert names(tmp_path) == before
    sender.close()


def test_a_reader_keeps_the_bytes_of_a_version_that_was_retired(tmp_path: Path) -> None:
    sender = shm(tmp_path, keep=1)
    manifest = sender.publish("e1", 1, weights(1.0))
    stream = received(make_receiver("shm"), manifest, 30)
    first = next(stream)[1]
    sender.publish("e1", 2, weights(2.0))
    sender.retire(frozenset())
    assert not Path(manifest.location).exists()
    assert torch.equal(first, torch.ones(1000))
    assert torch.equal(next(stream)[1], torch.ones(3, 5, dtype=torch.bfloat16))
    sender.close()


@pytest.mark.parametrize("transport", ["shm", "disk"])
def test_retire_keeps_the_newest_and_those_in_use(transport: str, tmp_path: Path) -> None:
    config = WeightConfig(directory=str(tmp_path), bucket_mb=1, keep=2)
    sender = shm_sender(config, "file-test") if transport == "shm" else disk_sender(config, tmp_path)
    for version in range(6):
        sender.publish("e1", version, weights(version))
    sender.retire(frozenset({1, 4}))
    assert [name for name in names(tmp_path) if name.startswith("v")] == [f"v{v:08d}-e1" for v in (1, 4, 5)]
    sender.retire(frozenset())
    assert [name for name in names(tmp_path) if name.startswith("v")] == [f"v{v:08d}-e1" for v in (4, 5)]
    sender.publish("e2", 3, weights())  # a rewind: newest is what was published last
    sender.retire(frozenset())
    assert [name for name in names(tmp_path) if name.startswith("v")] == ["v00000003-e2", "v00000005-e1"]
    sender.close()


def test_disk_versions_outlive_the_sender_and_are_retired_by_the_next(tmp_path: Path) -> None:
    sender = disk_sender(WeightConfig(keep=1), tmp_path)
    manifest = sender.publish("e1", 1, weights())
    sender.close()
    version = tmp_path / "weights" / "v00000001-e1"
    assert names(version) == ["bucket_00000.bin", "manifest.json"]
    assert msgspec.json.decode((version / "manifest.json").read_bytes(), type=WeightManifest) == manifest
    (tmp_path / "weights" / "v00000002-e1.tmp").mkdir()

    following = disk_sender(WeightConfig(keep=1), tmp_path)
    assert names(tmp_path / "weights") == [version.name]
    assert len(list(received(make_receiver("disk"), manifest, 30))) == 2
    following.publish("e2", 1, weights())
    following.retire(frozenset())
    assert names(tmp_path / "weights") == ["v00000001-e2"]


@pytest.mark.parametrize("transport", ["shm", "disk"])
def test_a_directory_that_cannot_be_made_is_refused(transport: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = WeightConfig(directory=str(tmp_path / "file"))
    with pytest.raises(WeightError, match="file"):
        shm_sender(config, "file-test") if transport == "shm" else disk_sender(config, tmp_path)
