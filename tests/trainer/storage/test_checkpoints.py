"""Tests checkpoints: which are complete, kept and chosen, after crashes and damage, too."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from protocol.errors import SettingsError, TetherError
from trainer.storage.checkpoints import CheckpointManifest, Checkpoints

ROOT = Path(__file__).resolve().parents[3]


def write(checkpoints: Checkpoints, version: int, text: str = "weights") -> Path:
    directory = checkpoints.begin(version)
    (directory / "rank_00000.safetensors").write_text(text)
    (directory / "rank_00001.safetensors").write_text(text * 2)
    checkpoints.finish(version, epoch="e1", digest=(1 << 64) - 1, sequence=40 + version, layout={"tensor": 1})
    return directory


def versions(checkpoints: Checkpoints) -> list[int]:
    return [checkpoint.version for checkpoint in checkpoints.complete()]


def test_a_checkpoint_says_what_it_is(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.latest() is None
    directory = write(checkpoints, 20)
    assert directory == tmp_path / "checkpoints" / "step_00000020"
    found = checkpoints.latest()
    assert found is not None
    assert (found.directory, found.version) == (directory, 20)
    manifest = found.manifest
    assert (manifest.epoch, manifest.sequence, manifest.digest, manifest.layout) == (
        "e1",
        60,
        (1 << 64) - 1,
        {"tensor": 1},
    )
    assert [(part.name, part.nbytes) for part in manifest.files] == [
        ("rank_00000.safetensors", 7),
        ("rank_00001.safetensors", 14),
    ]


def test_files_of_other_models_are_in_directories_of_their_own(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    directory = checkpoints.begin(3)
    (directory / "rank_00000.safetensors").write_text("policy")
    (directory / "critic").mkdir()
    (directory / "critic/rank_00000.safetensors").write_text("critic")
    checkpoints.finish(3, epoch="e1", digest=1, sequence=1)
    found = checkpoints.latest()
    assert found is not None
    names = [part.name for part in found.manifest.files]
    assert names == ["critic/rank_00000.safetensors", "rank_00000.safetensors"]
    (directory / "critic/rank_00000.safetensors").unlink()
    assert checkpoints.latest() is None


@pytest.mark.parametrize("name", ["../rank", "/rank", "a/../../rank", "a/b/rank"])
def test_files_elsewhere_are_no_part_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run", keep=2)
    path = write(checkpoints, 3) / "manifest.json"
    path.write_text(path.read_text().replace("rank_00000.safetensors", name))
    assert checkpoints.latest() is None


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (0, 5, 10, 15):
        write(checkpoints, version)
    assert versions(checkpoints) == [10, 15]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000010", "step_00000015"]


def test_a_fenced_trainer_does_not_prune_its_successors_checkpoints(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (5, 10, 12):
        write(checkpoints, version)
    (tmp_path / "step_00000014").mkdir()  # one that is being written
    write(checkpoints, 11)
    assert versions(checkpoints) == [10, 11, 12]
    assert (tmp_path / "step_00000014").exists()
    found = checkpoints.latest(at_most=11)
    assert found is not None
    assert found.version == 11


def test_a_checkpoint_with_other_weights_than_the_branch_is_skipped(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for version in (5, 10, 15):
        write(checkpoints, version)
    ours = (1 << 64) - 1
    assert newest(checkpoints, {5: ours, 10: ours, 15: 7}) == 10
    assert newest(checkpoints, {15: ours}) == 15
    assert newest(checkpoints, {5: 7, 10: 7, 15: 7}) == 15  # none fits: the newest, and a rewind


def newest(checkpoints: Checkpoints, digests: dict[int, int]) -> int:
    found = checkpoints.latest(digests=digests)
    assert found is not None
    return found.version


def test_a_checkpoint_may_be_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 5, "first")
    directory = write(checkpoints, 5, "second")
    found = checkpoints.latest()
    assert found is not None
    assert (directory / "rank_00000.safetensors").read_text() == "second"


def test_an_abandoned_checkpoint_leaves_what_was_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 5)
    directory = checkpoints.begin(10)
    (directory / "rank_00000.safetensors").write_text("half")
    assert versions(checkpoints) == [5]
    checkpoints.abandon(10)
    assert not directory.exists()
    assert versions(checkpoints) == [5]


@pytest.mark.parametrize("damage", ["manifest", "torn manifest", "missing part", "short part"])
def test_a_torn_checkpoint_is_skipped_and_removed_by_the_next(damage: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    write(checkpoints, 5)
    torn = write(checkpoints, 10)
    if damage == "manifest":
        (torn / "manifest.json").unlink()
    elif damage == "torn manifest":
        (torn / "manifest.json").write_bytes((torn / "manifest.json").read_bytes()[:-20])
    elif damage == "missing part":
        (torn / "rank_00001.safetensors").unlink()
    else:
        (torn / "rank_00001.safetensors").write_text("weig")
    found = checkpoints.latest()
    assert found is not None
    assert found.version == 5
    assert torn.exists()  # looking changes nothing
    write(checkpoints, 15)
    assert not torn.exists()
    assert versions(checkpoints) == [5, 15]


def test_damage_that_keeps_the_size_is_found_at_load(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 5)
    damaged = write(checkpoints, 10)
    (damaged / "rank_00001.safetensors").write_text("weightsweighty")
    assert checkpoints.latest(verify=False) is not None
    with pytest.raises(SettingsError, match=r"rank_00001\.safetensors is damaged.* remove .*step_00000010"):
        checkpoints.latest()
    shutil.rmtree(damaged)
    found = checkpoints.latest()
    assert found is not None
    assert found.version == 5


def test_a_directory_under_another_name_is_not_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 5).rename(tmp_path / "step_00000009")
    assert checkpoints.latest() is None


KILLED = """
import os, signal, sys
from pathlib import Path
from trainer.storage.checkpoints import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
for version in (1, 2):
    (checkpoints.begin(version) / "part").write_text("x")
    if version == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoints.finish(version, epoch="e1", digest=version, sequence=version)
"""


def test_kill_9_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "step_00000002" / "part").exists()
    found = Checkpoints(tmp_path, keep=2).latest()
    assert found is not None
    assert found.version == 1


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TetherError, match="file/step_00000001"):
        write(Checkpoints(tmp_path / "file", keep=2), 1)


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    directory = write(Checkpoints(tmp_path, keep=1), 3)
    raw = msgspec.json.decode((directory / "manifest.json").read_bytes())
    assert raw["version"] == 3
    assert len(raw["files"][0]["xxh3"]) == 16
    assert msgspec.convert(raw, CheckpointManifest).version == 3
