"""Tests exports to Hugging Face directories: what transformers loads from them, and what is refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.backends.base import Backend
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.registry import make_backend
from trainer.storage.checksums import FILE
from trainer.storage.hf_export import extra_layers, write_hf


def backend(model_dir: Path, dtype: str = "float32", name: str = "reference") -> Backend:
    return make_backend(
        model_dir,
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(),
        trainer=TrainerConfig(backend=name, dtype=dtype),
        algorithm=make_algorithm(AlgorithmConfig()),
    )


@pytest.mark.parametrize("shard_bytes", [1 << 30, 200_000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_loads_in_transformers(
    dtype: str, shard_bytes: int, model_dir: Path, tmp_path: Path
) -> None:
    made = backend(model_dir, dtype)
    write_hf(made.export_model(), tmp_path / "out", model_dir, shard_bytes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == getattr(torch, dtype)
    parameters = dict(loaded.named_parameters())
    for name, tensor in made.export():
        assert torch.equal(parameters[name], tensor.to(loaded.dtype))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("372=")["input_ids"] == [5, 9, 4, 12]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == (
        1 if shard_bytes > 1 << 20 else len(list((tmp_path / "out").glob("model-*")))
    )
    assert not (tmp_path / "out.tmp").exists()


def test_an_export_that_fails_leaves_the_one_before(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "t0", torch.zeros(2)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        write_hf(failing(), tmp_path / "out", model_dir)
    assert [path.name for path in tmp_path.glob("out*/*")] == ["thesis.txt"]


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1])
def test_layers_that_predict_further_tokens_are_exported_as_they_were(
    model_dir: Path, tmp_path: Path, shard_bytes: int
) -> None:
    source = tmp_path / "source"
    shutil.copytree(model_dir, source)
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    further = {
        f"model.layers.{layers}.eh_proj.weight": torch.randn(4, 8).bfloat16(),
        f"model.layers.{layers + 1}.enorm.weight": torch.randn(4),
        "mtp.fc.weight": torch.randn(2, 3).half(),
    }
    save_file(further, source / "further.safetensors")
    own = {"model.norm.weight": torch.zeros(3, dtype=torch.float16)}
    write_hf(iter(own.items()), tmp_path / "out", source, shard_bytes)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == (2 if shard_bytes > 1 else 4)
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert found.keys() == own.keys() | further.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in (own | further).items())
    assert all(found[name].dtype is tensor.dtype for name, tensor in further.items())
    again = dict(extra_layers(tmp_path / "out"))
    assert again.keys() == further.keys()  # an export can be the source of the next run


@pytest.mark.parametrize("shard_bytes", [1 << 30, 1])
def test_further_layers_that_the_model_trains_are_exported_once_as_trained(
    model_dir: Path, tmp_path: Path, shard_bytes: int
) -> None:
    """As a model's own code may do: it loads layers that config.json does not count."""
    source = tmp_path / "source"
    shutil.copytree(model_dir, source)
    layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    trained, further, head = (
        f"model.layers.{layers}.enorm.weight",
        f"model.layers.{layers}.x",
        "mtp.fc.weight",
    )
    for name in ("further", "copy"):  # the same tensors in two files, as beside a consolidated one
        save_file({key: torch.ones(4) for key in (trained, further, head)}, source / f"{name}.safetensors")
    own = {"model.norm.weight": torch.zeros(3), trained: torch.full((4,), 2.0), head: torch.full((4,), 3.0)}
    write_hf(iter(own.items()), tmp_path / "out", source, shard_bytes)
    files = [load_file(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert sorted(name for file in files for name in file) == sorted([*own, further])
    found = {name: tensor for file in files for name, tensor in file.items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in own.items())


def test_the_scripted_backend_can_be_exported(tmp_path: Path) -> None:
    write_hf(backend(tmp_path, name="scripted").export_model(), tmp_path / "out", tmp_path)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [FILE, "model.safetensors"]
