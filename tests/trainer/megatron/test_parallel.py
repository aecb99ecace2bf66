"""Tests that a rank does not wait for another one longer than its time limit."""

from pathlib import Path

import pytest

from tests.trainer.megatron.launch import launch


@pytest.mark.xdist_group("layouts")  # one process forks the ranks of all
def test_a_collective_that_a_rank_does_not_join_ends_with_an_error(tmp_path: Path) -> None:
    launch(2, "tests.trainer.megatron.timeout_ranks", str(tmp_path), logs=tmp_path / "logs")
    assert "5000ms" in (tmp_path / "error").read_text()
