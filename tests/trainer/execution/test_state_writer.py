"""Tests that a part of a checkpoint is written beside other work, one after the other."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.trainer.megatron.launch import launch
from trainer.execution.state_writer import StateWriter
from trainer.storage.host_state import HostState

STATE = HostState({"part": {"x": torch.ones(2)}})


@pytest.fixture
def writer() -> Iterator[StateWriter]:
    with closing(StateWriter()) as writer:
        yield writer


def test_part_is_there_when_it_is_finished(writer: StateWriter, tmp_path: Path) -> None:
    writer.begin(STATE, tmp_path)
    with pytest.raises(RuntimeError, match="before the last one is finished"):
        writer.begin(STATE, tmp_path)
    writer.wait()
    assert (tmp_path / "part").is_file()
    assert writer.finish() == ""


def test_failure_is_reported_once_and_names_the_file(writer: StateWriter, tmp_path: Path) -> None:
    writer.begin(STATE, tmp_path / "absent")
    writer.wait()
    assert "absent/part" in writer.finish()
    writer.begin(STATE, tmp_path)
    assert writer.finish() == ""
    assert (tmp_path / "part").is_file()


@pytest.mark.slow
def test_failure_of_one_rank_is_reported_to_all(tmp_path: Path) -> None:
    launch(2, "tests.trainer.execution.writing_rank", str(tmp_path), logs=tmp_path / "logs")
    assert "rank 1 could not write its part" in (tmp_path / "rank0.txt").read_text()
    assert "absent/part1" in (tmp_path / "rank1.txt").read_text()
    assert (tmp_path / "part0").is_file()
