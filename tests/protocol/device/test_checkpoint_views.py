"""Tests that a model's tensors are shown as transformers would save them, in the memory of its own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Interleave, WeightConverter

from protocol.device.checkpoint_views import checkpoint_views, model_tensors
from protocol.errors import SettingsError
from rollout.engines.contract.models import tiny_model
from tests.trainer.megatron.models import make_model

FAMILIES = ["qwen3-moe", "qwen2-moe", "mixtral", "deepseek-v2", "deepseek-v3", "glm4-moe", "gpt-oss"]


@pytest.mark.parametrize("name", FAMILIES)
def test_views_are_the_tensors_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for same in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        tensors = model_tensors(same)
        views = checkpoint_views(same, tensors)
        assert views.keys() == saved.keys()
        assert all(torch.equal(view, saved[found]) for found, view in views.items())
        for view in views.values():
            view.fill_(1.0)
        assert all((tensor == 1).all() for tensor in tensors.values())


def test_views_of_copies_are_in_the_copies() -> None:
    model = make_model("qwen3-moe")
    copies = {name: torch.zeros_like(tensor) for name, tensor in model_tensors(model).items()}
    checkpoint_views(model, copies)["model.layers.2.mlp.experts.5.up_proj.weight"].fill_(1.0)
    joined = copies["model.layers.2.mlp.experts.gate_up_proj"]
    assert joined[5, joined.shape[1] // 2 :].eq(1).all()
    assert sum(int(tensor.count_nonzero()) for tensor in copies.values()) == joined[5].numel() // 2


def test_views_of_a_model_without_experts_are_in_its_own_order() -> None:
    model = tiny_model(1, tied=True)
    views = checkpoint_views(model, model_tensors(model))
    assert list(views) == [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in views


def test_a_checkpoint_that_is_computed_from_the_model_is_refused() -> None:
    model = tiny_model(1)
    conversion = WeightConverter("self_attn.q_proj.weight", "self_attn.q_proj.weight", [Interleave(0)])
    model._weight_conversions = [conversion]
    with pytest.raises(SettingsError, match=r"type 'qwen2' can be .*layers\.0\.self_attn\.q_proj"):
        checkpoint_views(model, model_tensors(model))
