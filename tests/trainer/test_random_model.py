"""Tests that a random model and its tokenizer load in transformers and are the same for a seed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from protocol.errors import SettingsError
from trainer.config import ScratchConfig
from trainer.random_model import ARCHITECTURES, RECIPE, build_scratch


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_from_scratch_loads_and_is_the_same_for_a_seed(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    config = ScratchConfig(architecture=architecture, tie_word_embeddings=tied, num_key_value_heads=2, seed=5)
    one, two = build_scratch(config, tmp_path / "one"), build_scratch(config, tmp_path / "two")
    other = build_scratch(replace(config, seed=6), tmp_path / "other")
    assert contents(one) == contents(two)
    recipe = json.loads((one / RECIPE).read_text())
    # the recipes of runs that began before there were models with experts stay as they were
    assert ("num_experts" in recipe) == (architecture == "qwen3_moe")
    assert contents(one)["model.safetensors"] != contents(other)["model.safetensors"]
    model, loading = AutoModelForCausalLM.from_pretrained(one, output_loading_info=True)
    assert not any(loading.values())
    assert not model.model.embed_tokens.weight[0].any()
    matrices = [w.flatten() for w in model.parameters() if w.dim() > 1]
    assert torch.cat(matrices).std().item() == pytest.approx(config.initializer_range, rel=0.02)
    assert type(model).__name__.lower() == f"{architecture.replace('_', '')}forcausallm"
    assert (model.config.vocab_size, model.config.head_dim if architecture != "qwen2" else 32) == (16, 32)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.config.rope_parameters["rope_theta"] == config.rope_theta
    assert torch.isfinite(model(input_ids=torch.tensor([[5, 9, 4, 12]])).logits).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_character_is_one_token(architecture: str, tmp_path: Path) -> None:
    vocabulary = "ab\n\" +=<>0'"
    tokenizer = AutoTokenizer.from_pretrained(
        build_scratch(ScratchConfig(architecture=architecture, vocabulary=vocabulary), tmp_path / "m")
    )
    assert tokenizer(vocabulary)["input_ids"] == list(range(2, 2 + len(vocabulary)))
    text = "a b\nab  0+0=0 '\""
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2 + len(vocabulary))
    assert tokenizer("a<eos>")["input_ids"] == [2, 1]
    assert tokenizer.decode([2, 1], skip_special_tokens=True) == "a"


def test_the_default_is_the_small_qwen2_of_the_tests(model_dir: Path) -> None:
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(model_dir).parameters()) == 234_880


def test_building_again_changes_nothing(tmp_path: Path) -> None:
    out = build_scratch(ScratchConfig(), tmp_path / "m")
    stamps = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    build_scratch(ScratchConfig(), out)
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == stamps
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_directory_of_another_model_is_refused_and_not_changed(tmp_path: Path) -> None:
    out = build_scratch(ScratchConfig(), tmp_path / "m")
    before = contents(out)
    with pytest.raises(SettingsError, match="remove it"):
        build_scratch(ScratchConfig(seed=1), out)
    assert contents(out) == before
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match="remove it"):
        build_scratch(ScratchConfig(), tmp_path / "empty")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architecture": "qwen4"}, r"'qwen4' is not known; did you mean 'qwen3'\?"),
        ({"vocabulary": "aa"}, "each character once"),
        ({"vocabulary": ""}, "each character once"),
        ({"vocabulary": "é"}, "printable ASCII"),
        ({"num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_configuration_that_makes_no_model_is_refused(
    changes: dict[str, object], text: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError, match=text):
        build_scratch(replace(ScratchConfig(), **changes), tmp_path / "m")
    assert not list(tmp_path.iterdir())
