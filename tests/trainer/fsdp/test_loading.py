"""Tests that a model is read shard by shard, or whole where its files have other tensors.

test_backend.py counts what each of several ranks reads.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from protocol.device.checkpoint_views import model_tensors
from protocol.errors import SettingsError
from tests.trainer.fsdp.tiny_models import save_tiny
from tests.trainer.megatron.layout_runs import IF_CHANGED
from tests.trainer.megatron.models import make_model, save_model
from tests.trainer.recomputed.ranks import process_group
from trainer.config import ParallelConfig, TrainerConfig
from trainer.fsdp.backend import join_mesh
from trainer.fsdp.loading import load_shards
from trainer.layers.attention.kernels import choose_backend
from trainer.reference.shards import gathered

pytestmark = IF_CHANGED
TRAINER = TrainerConfig(device="cpu")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with process_group(1):
        yield join_mesh(ParallelConfig(), TRAINER)[0]


def assert_loaded(model_dir: Path, mesh: DeviceMesh) -> None:
    """The parameters are those that transformers loads."""
    found, _ = load_shards(model_dir, "model.path", mesh, TRAINER)
    expected = model_tensors(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32))
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(gathered(found[name]), expected[name])] == []


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3-moe", "gpt-oss"])
def test_the_files_have_every_shard(
    name: str, mesh: DeviceMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert_loaded(save_model(name, tmp_path), mesh)
    assert caplog.text == ""


def test_a_tensor_may_be_a_number(mesh: DeviceMesh, tmp_path: Path) -> None:
    assert_loaded(save_tiny("apertus", tmp_path), mesh)


@pytest.mark.parametrize("model_type", ["falcon_mamba", "mbart", "zamba"])
def test_layers_within_layers_or_that_share_parameters_stay_together(
    model_type: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    """transformers names parts of named layers, too, and zamba has a block that is in two layers."""
    assert_loaded(save_tiny(model_type, tmp_path), mesh)


def test_a_model_that_reads_in_both_directions_is_refused(mesh: DeviceMesh, tmp_path: Path) -> None:
    words = "model_type 'bert' is not causal, and the trainer needs a model that reads"
    with pytest.raises(SettingsError, match=words):
        load_shards(save_tiny("bert", tmp_path), "model.path", mesh, TRAINER)
    decoder = save_tiny("bert", tmp_path, is_decoder=True)
    assert_loaded(decoder, mesh)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("qwen2", "it computes on CUDA in 16 bits, and this is cpu, torch.bfloat16; use torch"),
        (
            "qwen3_next",
            "it computes packed samples, and model_type 'qwen3_next' has padded rows: layers of the",
        ),
    ],
)
def test_a_library_that_cannot_compute_the_attention_is_refused(
    model_type: str, why: str, mesh: DeviceMesh, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    trainer = replace(TRAINER, attention_backend="flash_attn", dtype="bfloat16")
    request.addfinalizer(lambda: choose_backend("auto"))
    choose_backend(trainer.attention_backend)
    with pytest.raises(SettingsError, match=f"setting trainer.attention_backend: flash_attn: {why}"):
        load_shards(save_tiny(model_type, tmp_path), "model.path", mesh, trainer)


def test_a_model_whose_outputs_are_no_numbers_is_refused_as_that(mesh: DeviceMesh, tmp_path: Path) -> None:
    model_dir = save_model("qwen2-tied", tmp_path)
    tensors = load_file(model_dir / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, model_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(SettingsError, match=f"model.path {model_dir}: its outputs for a few tokens are not"):
        load_shards(model_dir, "model.path", mesh, TRAINER)


def test_a_checkpoint_of_other_tensors_is_loaded_whole_and_the_log_says_so(
    mesh: DeviceMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("qwen2-tied")
    model.model.save_pretrained(tmp_path)  # names without the prefix of the model with its output layer
    model.config.save_pretrained(tmp_path)
    assert_loaded(tmp_path, mesh)
    assert "trainer.whole" in caplog.text


def test_a_quantised_checkpoint_is_read_with_its_scales(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Its rows alone are numbers in 8 bits, 448 at most."""
    model_dir = save_model("qwen2-tied", tmp_path)
    exact = load_file(model_dir / "model.safetensors")
    files: dict[str, torch.Tensor] = {}
    for name, tensor in exact.items():
        if "_proj.weight" not in name:
            files[name] = tensor
            continue
        scale = tensor.abs().max() / 448
        files[name] = (tensor / scale).to(torch.float8_e4m3fn)
        files[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(files, model_dir / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model_dir / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (model_dir / "config.json").write_text(json.dumps(config))
    found, _ = load_shards(model_dir, "model.path", mesh, TRAINER)
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(gathered(found[name]), exact[name].float(), rtol=0.1, atol=0.01)
