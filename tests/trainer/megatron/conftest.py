"""Launches layouts once for all tests that read their results, and joins megatron's groups of one rank."""

from collections.abc import Iterator

import pytest
import torch

from tests.trainer.megatron.layout_runs import Runs
from trainer.config import ParallelConfig
from trainer.megatron import cpu, parallel
from trainer.megatron.parallel import Position


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Results by layout."""
    torch.set_num_threads(1)
    return Runs(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="session")
def moves(runs: Runs) -> Runs:
    """Results by layout, those of other layouts' checkpoints included."""
    runs.restore_back()
    return runs


@pytest.fixture(scope="module")
def position() -> Iterator[Position]:
    cpu.install()
    yield parallel.initialize(ParallelConfig(), "cpu", 0)
    parallel.finalize()
