"""Tests that parts of checkpoints and exports are written beside other work, one after the other."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.trainer.megatron.launch import launch
from trainer.execution.state_writer import CHECKPOINT, EXPORT, StateWriter
from trainer.storage.hf_export import Shards
from trainer.storage.host_state import HostState

STATE = HostState({"part": {"x": torch.ones(2)}})


@pytest.fixture
def writer() -> Iterator[StateWriter]:
    with closing(StateWriter()) as writer:
        yield writer


def test_parts_are_there_when_they_are_finished(writer: StateWriter, tmp_path: Path) -> None:
    writer.begin(STATE, tmp_path)
    writer.begin(Shards({"x": torch.ones(2)}, rank=3), tmp_path)
    writer.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00003_00000.safetensors", "part"]
    assert writer.finish() == {}


def test_failure_is_reported_once_and_names_the_file(writer: StateWriter, tmp_path: Path) -> None:
    writer.begin(STATE, tmp_path / "absent")
    writer.wait()
    assert "absent/part" in writer.finish()[CHECKPOINT]
    writer.begin(STATE, tmp_path)
    assert writer.finish() == {}
    assert (tmp_path / "part").is_file()


def test_failed_export_is_told_apart_from_its_checkpoint(writer: StateWriter, tmp_path: Path) -> None:
    (tmp_path / "export").touch()
    writer.begin(STATE, tmp_path)
    writer.begin(Shards({"x": torch.ones(2)}), tmp_path / "export", EXPORT)
    failed = writer.finish()
    assert failed.keys() == {EXPORT}
    assert failed[EXPORT].startswith("export: ")
    assert str(tmp_path / "export") in failed[EXPORT]


@pytest.mark.slow
def test_failure_of_one_rank_is_reported_to_all(tmp_path: Path) -> None:
    launch(2, "tests.trainer.execution.writing_rank", str(tmp_path), logs=tmp_path / "logs")
    assert "rank 1 could not write its part" in (tmp_path / "rank0.txt").read_text()
    assert "absent/part1" in (tmp_path / "rank1.txt").read_text()
    assert (tmp_path / "part0").is_file()
    assert all("export" not in path.read_text() for path in tmp_path.glob("rank?.txt"))
