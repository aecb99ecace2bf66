"""Tests what the patches of `trainer/megatron/cpu.py` do not change.

They are made once, so in a separate process.
"""

from pathlib import Path

import pytest
import torch

import trainer.megatron.cpu  # noqa: F401 (imports megatron-core)
from tests.trainer.megatron.launch import launch


@pytest.mark.xdist_group("layouts")  # one process forks the ranks of all
def test_models_load_as_ever_beside_megatron_on_a_cpu(tmp_path: Path) -> None:
    launch(1, "tests.trainer.megatron.cpu_patches", str(tmp_path / "model"), logs=tmp_path)


def test_import_leaves_torch_compile_as_it_is() -> None:
    assert torch.compile.__module__ == "torch"
