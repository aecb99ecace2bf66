"""Tests that a checkpoint of the first format is refused in another layout, with what to do.

tests/integration/test_old_run.py restores one in its own.
"""

import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS
from trainer.megatron.checkpoint.description import TrainedModel
from trainer.megatron.checkpoint.first_format import restore_first_format
from trainer.megatron.checkpoint.reading import read_description
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.layout import Layout

PACKED = Path(__file__).parents[3] / "fixtures/run_1a6dd8a.tar.gz"


def test_the_first_format_is_refused_in_another_layout(tmp_path: Path) -> None:
    with tarfile.open(PACKED) as tar:
        tar.extractall(tmp_path, filter="data")
    run = tmp_path / "megatron"
    checkpoint = run / "checkpoints/step_00000004"
    architecture = read_architecture(run / "model")
    single = Layout(stages=((range(architecture.layers),),))
    model = TrainedModel(architecture, replace(single, tp=2), "bfloat16", NO_ADAPTERS, distributed=False)
    saved = read_description(checkpoint)
    with pytest.raises(
        SettingsError, match=r"older release.*tensor_model_parallel_size is 1 .* and 2.*dtype"
    ):
        restore_first_format(checkpoint, {}, None, model, 0, saved)  # type: ignore[arg-type]
