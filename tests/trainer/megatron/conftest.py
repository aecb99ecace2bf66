"""Joins megatron's groups of one rank."""

from collections.abc import Iterator

import pytest

from trainer.config import ParallelConfig
from trainer.megatron import cpu, parallel
from trainer.megatron.parallel import Position


@pytest.fixture(scope="module")
def position() -> Iterator[Position]:
    cpu.install()
    yield parallel.initialize(ParallelConfig(), "cpu", 0)
    parallel.finalize()
