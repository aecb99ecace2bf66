"""Gives the trainer's tests one torch thread, a small model, and results of layouts, each launched once."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from trainer.config import ScratchConfig
from trainer.random_model import build_scratch

if TYPE_CHECKING:
    from tests.trainer.megatron.layout_runs import Runs


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 234,880-parameter Qwen2 with a vocabulary of 16."""
    return build_scratch(ScratchConfig(), tmp_path_factory.mktemp("scratch") / "model")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> "Runs":
    """Results by layout."""
    from tests.trainer.megatron.layout_runs import Runs  # imports megatron-core

    return Runs(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="session")
def moves(runs: "Runs") -> "Runs":
    """Results by layout, those of other layouts' checkpoints included."""
    runs.restore_back()
    return runs
