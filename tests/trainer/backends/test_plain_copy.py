"""Tests copies of quantised checkpoints: transformers loads the same weights, which it dequantises itself."""

import os
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config, PreTrainedModel

from protocol.errors import SettingsError
from tests.trainer.backends.quantised_models import FP8, PROJECTION, change, describe, save_fp8, save_mxfp4
from trainer.backends.plain_copy import quantization_of, write_plain


def assert_loads_as(copy: Path, expected: PreTrainedModel) -> None:
    assert quantization_of(copy) is None
    found = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.bfloat16).state_dict()
    assert found.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found[name], tensor), name


def test_blocks_of_fp8_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    source = save_fp8(tmp_path / "fp8")
    write_plain(source, tmp_path / "plain")
    expected = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    assert_loads_as(tmp_path / "plain", expected)
    assert {tensor.dtype for tensor in load_file(tmp_path / "plain/model.safetensors").values()} == {
        torch.bfloat16
    }


def test_experts_of_mxfp4_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    source = save_mxfp4(tmp_path / "mxfp4")
    write_plain(source, tmp_path / "plain")
    expected = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    assert_loads_as(tmp_path / "plain", expected)


@pytest.mark.parametrize(
    ("end", "scale", "by_element"),
    [
        ("_scale", torch.tensor(0.5), lambda scale: scale),
        ("_scale_inv", torch.tensor([0.5]), lambda scale: scale),
        ("_scale", torch.arange(1.0, 129), lambda scale: scale[:, None]),
        ("_scale", torch.arange(1.0, 129)[:, None], lambda scale: scale),
        # the last blocks of rows and of columns are cut
        (
            "_scale_inv",
            torch.arange(1.0, 7).reshape(3, 2),
            lambda scale: torch.stack([scale[i // 48, torch.arange(128) // 96] for i in range(128)]),
        ),
    ],
    ids=["tensor", "tensor of one", "rows", "rows in a column", "ragged blocks"],
)
def test_scales_multiply_their_part(
    tmp_path: Path, end: str, scale: torch.Tensor, by_element: object
) -> None:
    source = save_fp8(tmp_path / "fp8")
    describe(source, quant_method="fp8", weight_block_size=[48, 96])
    bits = load_file(source / "model.safetensors")[PROJECTION]
    own = {f"{PROJECTION}_scale_inv": None, PROJECTION + end: scale}
    others = {
        name: None
        for name in load_file(source / "model.safetensors")
        if "_proj.weight" in name and not name.startswith(PROJECTION)
    }
    change(source, **{**others, **own, PROJECTION.replace("weight", "input_scale"): torch.tensor(3.0)})
    write_plain(source, tmp_path / "plain")
    found = load_file(tmp_path / "plain/model.safetensors")
    expected = (bits.float() * by_element(scale)).to(torch.bfloat16)  # type: ignore[operator]
    assert torch.equal(found[PROJECTION], expected)
    assert not any("scale" in name for name in found)


@pytest.mark.parametrize(
    ("changes", "method", "words"),
    [
        ({f"{PROJECTION}_scale_inv": None}, FP8, "q_proj.weight is in 8 bits and has no scale"),
        ({f"{PROJECTION}_scale_inv": torch.ones(3, 2)}, FP8, r"q_proj.weight has the shape .* \(3, 2\)"),
        ({}, {"quant_method": "awq", "bits": 4}, "'awq'; checkpoints of fp8 and mxfp4 are read"),
    ],
)
def test_other_checkpoints_are_refused_by_name_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], method: dict[str, object], words: str
) -> None:
    source = save_fp8(tmp_path / "fp8")
    describe(source, **method)
    change(source, **changes)
    with pytest.raises(SettingsError, match=words):
        write_plain(source, tmp_path / "plain")
    assert [path.name for path in tmp_path.iterdir()] == ["fp8"]


def test_blocks_without_exponents_are_refused_by_name(tmp_path: Path) -> None:
    source = save_mxfp4(tmp_path / "mxfp4")
    change(source, **{"model.layers.1.mlp.experts.down_proj_scales": None})
    with pytest.raises(SettingsError, match=r"layers.1.mlp.experts.down_proj_blocks has no .*_scales"):
        write_plain(source, tmp_path / "plain")


def test_the_first_complete_copy_stays_and_what_a_killed_process_left_goes(tmp_path: Path) -> None:
    source, plain = save_fp8(tmp_path / "fp8"), tmp_path / "plain"
    left = tmp_path / ".plain.killed"
    left.mkdir()
    os.utime(left, (0, 0))
    with ThreadPoolExecutor(3) as pool:
        writers = [pool.submit(write_plain, source, plain) for _ in range(3)]
        wait(writers, return_when=FIRST_COMPLETED)
        first = (plain / "model.safetensors").stat().st_ino
    assert [writer.result() for writer in writers] == [None] * 3
    assert (plain / "model.safetensors").stat().st_ino == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8", "plain"]


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    source = save_fp8(tmp_path / "fp8")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(SettingsError, match=f"^{source}: "):
        write_plain(source, tmp_path / "plain")
    assert [path.name for path in tmp_path.iterdir()] == ["fp8"]
