"""Joins megatron's groups of one rank, and closes what a test has attached."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.trainer.megatron.attached import Place
from trainer.config import ParallelConfig
from trainer.megatron import cpu, parallel
from trainer.megatron.parallel import Position


@pytest.fixture(scope="module")
def position() -> Iterator[Position]:
    cpu.install()
    yield parallel.initialize(ParallelConfig(), "cpu", 0)
    parallel.finalize()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    torch.set_num_threads(1)
    with ExitStack() as stack:
        yield Place(tmp_path, stack)
