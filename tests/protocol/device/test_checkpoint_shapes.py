"""Tests the shapes of a checkpoint, read from its files or built from its architecture."""

from pathlib import Path

import pytest

from protocol.device.checkpoint_shapes import checkpoint_shapes
from protocol.errors import EngineError
from rollout.engines.contract.models import tiny_model, weights


def test_checkpoint_shapes_come_from_files_or_from_the_architecture(tmp_path: Path) -> None:
    model = tiny_model(1)
    model.save_pretrained(tmp_path / "full")
    model.config.save_pretrained(tmp_path / "bare")
    expected = {name: tuple(tensor.shape) for name, tensor in weights(model).items()}
    assert checkpoint_shapes(tmp_path / "full") == expected
    assert checkpoint_shapes(tmp_path / "bare") == expected
    (tmp_path / "full" / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(EngineError, match=r"model\.safetensors"):
        checkpoint_shapes(tmp_path / "full")
