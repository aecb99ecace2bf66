"""Tests that a checkpoint is loaded whole or refused by the name of a tensor, and the memory this takes."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from protocol.errors import SettingsError
from tests.trainer.megatron.models import make_model, save_model
from trainer.backends.safetensors_reader import SafetensorsReader
from trainer.config import ParallelConfig
from trainer.megatron.families.decoder import EMBEDDING
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.families.stages import stage_rules
from trainer.megatron.layout import Grid, Layout, Place
from trainer.megatron.loading import check_names, check_parameters, load_checkpoint

MIB = 1 << 20
SLACK = 4 * MIB
"""What the interpreter and the allocator take meanwhile."""


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


class Watched(Mapping[str, torch.Tensor]):
    """Parameters that note the process's memory whenever the next one is looked up."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self._parameters = parameters
        self.seen: list[int] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.seen.append(anonymous_bytes())
        return self._parameters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


@pytest.mark.parametrize("tp", [1, 2])
def test_loading_takes_a_ranks_part_and_no_more_than_one_tensor(tmp_path: Path, tp: int) -> None:
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, vocab_size=4096,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    architecture = read_architecture(tmp_path)
    layout = Layout.of(ParallelConfig(tensor_model_parallel_size=tp), architecture.layers)
    rules = stage_rules(architecture, layout, 0)
    shapes = {name: shape for rule in rules for name, shape in rule.shapes.items()}
    save_file(
        {name: torch.full(shape, 2.0) for name, shape in shapes.items()}, tmp_path / "model.safetensors"
    )
    largest = max(4 * torch.Size(shape).numel() for shape in shapes.values())
    grid = layout.grid(expert=False)
    parameters = Watched({rule.parameter: torch.ones(rule.local_shape(grid)) for rule in rules})
    part = sum(tensor.nbytes for tensor in parameters.values())
    before = anonymous_bytes()
    parameters.seen.clear()
    load_checkpoint(tmp_path, architecture, parameters, layout, Place(tp=tp - 1))
    assert len(parameters.seen) >= len(rules)
    assert part > 4 * (largest + SLACK)  # or a loader that keeps everything would pass
    assert max(*parameters.seen, anonymous_bytes()) - before <= largest + SLACK
    assert all(tensor.eq(2.0).all() for tensor in parameters.values())


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return save_model("qwen2-tied", tmp_path)


def change_tensors(model_dir: Path, **changes: torch.Tensor | None) -> None:
    path = model_dir / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def check(model_dir: Path) -> None:
    with SafetensorsReader(model_dir) as reader:
        architecture = read_architecture(model_dir)
        check_names(reader, architecture, Layout.of(ParallelConfig(), architecture.layers))


def test_an_unmapped_name_is_refused(model_dir: Path) -> None:
    change_tensors(model_dir, **{"model.layers.0.self_attn.sinks": torch.zeros(4)})
    with pytest.raises(SettingsError, match=r"no rule of qwen2 maps model\.layers\.0\.self_attn\.sinks"):
        check(model_dir)


def test_layers_that_predict_further_tokens_are_no_error_where_the_family_has_them(tmp_path: Path) -> None:
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(4, 8)}
    model_dir = save_model("deepseek-v3-dense", tmp_path)
    change_tensors(model_dir, **extra)
    check(model_dir)
    other = save_model("qwen3-yarn", tmp_path)
    change_tensors(other, **extra)
    with pytest.raises(SettingsError, match=r"no rule of qwen3 maps model\.layers\.2\.eh_proj"):
        check(other)


def test_a_missing_name_is_refused(model_dir: Path) -> None:
    change_tensors(model_dir, **{"model.norm.weight": None})
    with pytest.raises(SettingsError, match=r"lacks model\.norm\.weight"):
        check(model_dir)


def test_a_wrong_shape_is_refused(model_dir: Path) -> None:
    change_tensors(model_dir, **{"model.norm.weight": torch.zeros(3)})
    with pytest.raises(
        SettingsError, match=r"model\.norm\.weight has shape \(3,\), but by config\.json it should be \(64,\)"
    ):
        check(model_dir)


def test_a_dtype_that_needs_scales_is_refused(model_dir: Path) -> None:
    quantized = torch.zeros(64).to(torch.float8_e4m3fn)
    change_tensors(model_dir, **{"model.norm.weight": quantized})
    with pytest.raises(SettingsError, match=r"model\.norm\.weight has dtype F8_E4M3: supported are F64"):
        check(model_dir)


def test_a_tied_output_layer_that_is_saved_once_more_is_no_error(model_dir: Path) -> None:
    embedding = load_file(model_dir / "model.safetensors")[EMBEDDING]
    change_tensors(model_dir, **{"lm_head.weight": embedding.clone()})
    check(model_dir)


def test_a_tied_output_layer_that_is_not_the_embedding_is_refused(model_dir: Path) -> None:
    change_tensors(model_dir, **{"lm_head.weight": torch.zeros(96, 64)})
    with pytest.raises(SettingsError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        check(model_dir)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    model_dir = save_model("llama", tmp_path)
    lost = json.loads((model_dir / "model.safetensors.index.json").read_text())["weight_map"][
        "model.norm.weight"
    ]
    (model_dir / lost).unlink()
    with pytest.raises(SettingsError, match=f"lacks {lost}"):
        check(model_dir)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    make_model("qwen2").config.save_pretrained(tmp_path)
    with pytest.raises(SettingsError, match="must be a complete safetensors checkpoint"):
        check(tmp_path)


def test_parameters_and_rules_must_match_one_to_one(model_dir: Path) -> None:
    architecture = read_architecture(model_dir)
    rules = stage_rules(architecture, Layout.of(ParallelConfig(), architecture.layers), 0)
    parameters = {rule.parameter: torch.zeros(rule.local_shape(Grid())) for rule in rules}
    check_parameters(rules, parameters, Layout())
    with pytest.raises(SettingsError, match=r"more than one rule maps decoder\.final_layernorm\.weight"):
        check_parameters([*rules, rules[-1]], parameters, 1)
    with pytest.raises(SettingsError, match=r"differ in decoder\.extra"):
        check_parameters(rules, {**parameters, "decoder.extra": torch.zeros(1)}, Layout())
    with pytest.raises(SettingsError, match="its rule says"):
        check_parameters(rules, {**parameters, rules[-1].parameter: torch.zeros(1)}, Layout())
