"""Tests that parameters which were repacked after loading are found, whatever repacked them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from protocol.errors import EngineError
from rollout.staging.loaded_weights import check_loaded
from tests.rollout.staging.models import SHAPES, Fused, traced


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> Fused:
    """A model that was loaded from two files."""
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    save_file({"q": tensors["q"]}, directory / "model-1.safetensors")
    save_file({"k": tensors["k"], "embed": tensors["embed"]}, directory / "model-2.safetensors")
    model = Fused()
    with torch.no_grad():
        model.load_weights(tensors.items())
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_as_the_loader_wrote_them_are_accepted(tmp_path: Path, dtype: torch.dtype) -> None:
    check_loaded(traced(loaded(tmp_path, dtype)), tmp_path)


@pytest.mark.parametrize(("first", "name"), [(0, "q"), (4, "k")])
def test_a_parameter_that_was_repacked_in_place_is_named(tmp_path: Path, first: int, name: str) -> None:
    model = loaded(tmp_path)
    with torch.no_grad():
        model.qk[first : first + 2] = model.qk[first : first + 2].flip(0)
    plan = traced(model)
    plan.calibrate()
    with pytest.raises(EngineError, match=rf"parameter qk: it does not hold {name} where the loader wrote"):
        check_loaded(plan, tmp_path)


def test_weights_that_come_from_no_file_are_not_compared(tmp_path: Path) -> None:
    check_loaded(traced(Fused()), tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    model = loaded(tmp_path)
    (tmp_path / "model-2.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(EngineError, match=str(tmp_path)):
        check_loaded(traced(model), tmp_path)
