"""Files of ranks on several hosts, of which a network file system shows one late, or not all of it."""

from pathlib import Path

import pytest
import torch

import trainer.weights.part_files as part_files
from protocol.errors import WeightError
from protocol.messages import WeightManifest
from protocol.weights.deltas import changes_name
from tests.trainer.weights.senders import layout_of
from trainer.config import WeightConfig
from trainer.weights.part_files import PartFiles, PartOrder, check_files

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5)}
ORDER = PartOrder("v1.tmp", own_files=True)


@pytest.fixture
def blank() -> WeightManifest:
    return layout_of(TENSORS.items(), WeightConfig())


def test_rank_waits_for_the_directory_that_rank_0_has_made(
    blank: WeightManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: (tmp_path / "v1.tmp").mkdir())
    report = PartFiles(blank, 0, keeps=False).write(TENSORS.items(), ORDER, tmp_path)
    assert (report.error, report.nbytes) == ("", 4 * 17)
    check_files(tmp_path / "v1.tmp", [report])


def test_directory_that_never_shows_is_the_version_s_error(
    blank: WeightManifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_files, "SEE_S", 0.0)
    report = PartFiles(blank, 0, keeps=False).write(TENSORS.items(), ORDER, tmp_path)
    assert report.error.startswith("rank 0: [Errno 2] No such file or directory")


def test_file_that_rank_0_does_not_see_whole_is_refused(blank: WeightManifest, tmp_path: Path) -> None:
    (tmp_path / "v1.tmp").mkdir()
    report = PartFiles(blank, 0, keeps=False).write(TENSORS.items(), ORDER, tmp_path)
    with (tmp_path / "v1.tmp" / changes_name(0)).open("rb+") as file:
        file.truncate(60)
    with pytest.raises(WeightError, match=r"rank 0 wrote 68 bytes to delta_00000.bin, rank 0 sees 60"):
        check_files(tmp_path / "v1.tmp", [report])
