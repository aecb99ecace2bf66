"""Exports of a run: which is the newest, and what is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from protocol.errors import SettingsError
from services.serving.exports import load_model, newest_export
from trainer.storage.checksums import write_checksums


def test_newest_export_is_the_one_with_the_highest_step(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no exported checkpoint"):
        newest_export(tmp_path)
    for name in ("step_00000010", "step_00000020", "step_00000030.tmp", "best_step_00000040"):
        (tmp_path / "exports" / name).mkdir(parents=True)
    assert newest_export(tmp_path).name == "step_00000020"


def test_a_directory_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"lacks \*.safetensors"):
        load_model(tmp_path)


def test_a_damaged_export_is_not_loaded(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(3)}, weights)
    write_checksums(tmp_path)
    assert load_model(tmp_path)["w"].tolist() == [1.0, 1.0, 1.0]
    weights.write_bytes(weights.read_bytes()[:-1] + b"A")
    with pytest.raises(SettingsError, match=r"model\.safetensors is damaged"):
        load_model(tmp_path)
