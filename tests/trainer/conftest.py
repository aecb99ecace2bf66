"""Gives the trainer's tests one torch thread and a small model."""

from pathlib import Path

import pytest
import torch

from trainer.config import ScratchConfig
from trainer.random_model import build_scratch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 234,880-parameter Qwen2 with a vocabulary of 16."""
    return build_scratch(ScratchConfig(), tmp_path_factory.mktemp("scratch") / "model")
