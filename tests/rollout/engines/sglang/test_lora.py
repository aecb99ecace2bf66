"""Tests how SGLang's adapter loader is traced with numbers, and the first adapter."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import EngineError
from protocol.weights.lora import LoraConfig
from rollout.engines.contract.models import tiny_model
from rollout.engines.sglang.launch import (
    adapter_options,
)
from rollout.engines.sglang.lora import Numbered, write_adapter


@given(st.data())
def test_numbers_sent_through_a_loader_show_what_it_copies(data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 5))
    shapes = {f"t{i}": (data.draw(st.integers(1, 6)), columns) for i in range(data.draw(st.integers(1, 4)))}
    left = data.draw(st.integers(0, columns - 1))
    right = data.draw(st.integers(left + 1, columns))
    pieces = []
    for name in data.draw(st.lists(st.sampled_from([*shapes, ""]), min_size=1, max_size=6)):
        begin, end = sorted(data.draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))
        pieces.append((name, begin, end + 1))

    def load(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        nothing = torch.zeros(7, columns, dtype=next(iter(tensors.values())).dtype)
        return torch.cat([tensors.get(name, nothing)[begin:end, left:right] for name, begin, end in pieces])

    numbered = Numbered.of(shapes)
    values = {name: torch.randn(shape) for name, shape in shapes.items()}
    expected = load(values)
    if not expected.numel():
        return
    copies, fills = numbered.found_in("p", load(numbered.tensors))
    found = torch.full_like(expected, torch.nan)
    for copy in copies:
        copy.target.on(found).copy_(copy.source.on(values[copy.name]))
    for fill in fills:
        fill.on(found).zero_()
    assert torch.equal(found, expected)


def test_rearranged_tensor_is_refused() -> None:
    numbered = Numbered.of({"t": (2, 3), "u": (2, 1)})
    for rearranged in (numbered.tensors["t"].T.contiguous(), torch.cat([*numbered.tensors.values()], 1)):
        with pytest.raises(EngineError, match=r"rearranges the rows of adapter tensor o_proj\.0\.a"):
            numbered.found_in("o_proj.0.a", rearranged)


def test_adapter_without_tensors_changes_nothing_and_covers_fused_layers(tmp_path: Path) -> None:
    model = tiny_model(1)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    write_adapter(
        tmp_path / "adapter",
        shapes,
        LoraConfig(rank=4, target_modules=("v_proj", "up_proj", "o_proj")),
        "bfloat16",
    )
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["lora_alpha"] == config["r"] == 4
    tensors = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 6 * 2
    assert not any(tensor.any() for tensor in tensors.values())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "--max-loras-per-batch=1" in adapter_options({"policy": tmp_path})
