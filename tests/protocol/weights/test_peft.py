"""Tests which adapters in PEFT's format training can start from."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from protocol.errors import SettingsError
from protocol.weights.lora import LoraConfig, adapter_shapes, adapter_targets
from protocol.weights.peft import CONFIG, TENSORS, check_peft, target_modules

TARGETS = adapter_targets(
    {
        "model.layers.0.self_attn.q_proj.weight": (8, 6),
        "model.layers.0.self_attn.o_proj.weight": (6, 8),
    },
    LoraConfig(rank=2),
)
SHAPES = adapter_shapes(TARGETS, 2)
WRITTEN = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "bias": "none",
    "rank_pattern": {},
    "use_dora": False,
}
"""What PEFT writes, in part; the other fields do not matter here."""


def write(directory: Path, shapes: dict[str, tuple[int, ...]], **fields: object) -> LoraConfig:
    (directory / CONFIG).write_text(json.dumps({**WRITTEN, **fields}))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, directory / TENSORS)
    return LoraConfig(rank=2, alpha=4.0, path=str(directory))


def test_adapter_of_the_same_layers_passes(tmp_path: Path) -> None:
    check_peft(TARGETS, write(tmp_path, SHAPES))
    assert target_modules(SHAPES) == ["o_proj", "q_proj"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"r": 8}, r"lora\.path: .*: r is 8; set lora\.rank to it, which is 2"),
        ({"lora_alpha": 16}, r"lora_alpha is 16; set lora\.alpha to it, which is 4\.0"),
        ({"use_rslora": True}, r"use_rslora is True; set lora\.use_rslora"),
        ({"use_dora": True}, "use_dora is True; only False is supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ],
)
def test_other_adapter_is_refused_by_its_field(tmp_path: Path, fields: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        check_peft(TARGETS, write(tmp_path, SHAPES, **fields))


def test_adapter_of_other_layers_is_refused_by_its_tensor(tmp_path: Path) -> None:
    fewer = dict(list(SHAPES.items())[:2])
    with pytest.raises(
        SettingsError, match=r"no tensor .*o_proj.*; set lora\.target_modules to \[\"q_proj\"\]"
    ):
        check_peft(TARGETS, write(tmp_path, fewer))
    more = {**SHAPES, "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (2, 6)}
    with pytest.raises(SettingsError, match=r"up_proj.lora_A.weight belongs to no weight"):
        check_peft(TARGETS, write(tmp_path, more))
    wrong = {**SHAPES, TARGETS[0].a: (2, 7)}
    with pytest.raises(SettingsError, match=r"has the shape \(2, 7\), the model's needs \(2, 6\)"):
        check_peft(TARGETS, write(tmp_path, wrong))


def test_directory_without_an_adapter_is_refused(tmp_path: Path) -> None:
    config = LoraConfig(rank=2, path=str(tmp_path))
    with pytest.raises(SettingsError, match=r"adapter_config\.json: No such file"):
        check_peft(TARGETS, config)
    (tmp_path / CONFIG).write_text("[]")
    with pytest.raises(SettingsError, match="not a JSON object"):
        check_peft(TARGETS, config)
    (tmp_path / CONFIG).write_text(json.dumps({**WRITTEN, "lora_alpha": 16.0}))
    with pytest.raises(SettingsError, match=r"adapter_model\.safetensors: No such file"):
        check_peft(TARGETS, config)


def test_nothing_is_read_without_a_path() -> None:
    check_peft(TARGETS, LoraConfig(rank=2))
