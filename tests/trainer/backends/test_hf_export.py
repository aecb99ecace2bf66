"""Tests exports to Hugging Face directories: what transformers loads from them, and what is refused."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from protocol.errors import SettingsError
from trainer.algorithms import AlgorithmConfig, make_algorithm
from trainer.backends.base import Backend
from trainer.backends.hf_export import save_hf
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.registry import make_backend


def backend(model_dir: Path, dtype: str = "float32", name: str = "reference") -> Backend:
    return make_backend(
        model_dir,
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(),
        trainer=TrainerConfig(backend=name, dtype=dtype),
        algorithm=make_algorithm(AlgorithmConfig()),
    )


@pytest.mark.parametrize("shard_bytes", [1 << 30, 200_000])
@pytest.mark.parametrize(
    ("trained", "asked", "wanted"),
    [("float32", "", "float32"), ("bfloat16", "", "bfloat16"), ("float32", "bfloat16", "bfloat16")],
)
def test_an_export_loads_in_transformers(
    trained: str, asked: str, wanted: str, shard_bytes: int, model_dir: Path, tmp_path: Path
) -> None:
    made = backend(model_dir, trained)
    save_hf(made, tmp_path / "out", source=model_dir, dtype=asked, shard_bytes=shard_bytes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == getattr(torch, wanted)
    parameters = dict(loaded.named_parameters())
    for name, tensor in made.export():
        assert torch.equal(parameters[name], tensor.to(loaded.dtype))
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("372=")["input_ids"] == [5, 9, 4, 12]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == (
        1 if shard_bytes > 1 << 20 else len(list((tmp_path / "out").glob("model-*")))
    )
    assert not (tmp_path / "out.tmp").exists()


def test_an_existing_directory_is_refused_and_not_changed(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(SettingsError, match="out exists"):
        save_hf(backend(model_dir), tmp_path / "out", source=model_dir)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


class Counting:
    """An export that says how far it was taken."""

    def __init__(self) -> None:
        self.taken = 0

    def export_model(self) -> Iterator[tuple[str, torch.Tensor]]:
        for _ in range(4):
            self.taken += 1
            yield f"t{self.taken}", torch.zeros(2)


def test_a_refused_export_completes_the_collective(model_dir: Path, tmp_path: Path) -> None:
    counting = Counting()
    with pytest.raises(SettingsError, match="dtype 'float8'"):
        save_hf(counting, tmp_path / "out", source=model_dir, dtype="float8")  # type: ignore[arg-type]
    assert counting.taken == 4
    assert not (tmp_path / "out").exists()


def test_the_scripted_backend_can_be_exported(tmp_path: Path) -> None:
    save_hf(backend(tmp_path, name="scripted"), tmp_path / "out", source=tmp_path)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
