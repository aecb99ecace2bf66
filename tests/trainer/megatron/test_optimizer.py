"""Tests that gradients which are added up in the backward pass are those that are added up after it."""

from pathlib import Path

import pytest

from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.models import save_model
from tests.trainer.megatron.overlap_ranks import LAYOUTS


@pytest.mark.xdist_group("layouts")  # one process forks the ranks of all
def test_overlapped_sums_of_gradients_change_no_bit(tmp_path: Path) -> None:
    for name in LAYOUTS:
        save_model(name, tmp_path)
    launch(2, "tests.trainer.megatron.overlap_ranks", str(tmp_path), logs=tmp_path / "logs")
