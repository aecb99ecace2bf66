"""Tests which models draft for a target, by which method of vLLM, and which are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.errors import EngineSettingsError
from protocol.weights.lora import LoraConfig
from rollout.engines.base import EngineConfig
from rollout.engines.requests import read_config
from rollout.engines.vllm.drafts.models import check_draft_model, draft_arguments
from tests.contracts.engine_draft_models import DRAFT_MODELS, tiny_further, tiny_shallow


def drafting(directory: Path, kind: str, **changes: Any) -> EngineConfig:
    """Write a target into `directory`/model, and a model of a kind that drafts for it; return settings."""
    target = tiny_further(1) if kind == "further" else tiny_shallow(1)
    target.save_pretrained(directory / "model")
    draft_model = DRAFT_MODELS[kind](target, directory)
    settings = {"drafts": "model", "num_speculative_tokens": 3, "draft_model": draft_model}
    return EngineConfig(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "method"),
    [("eagle", "eagle"), ("eagle3", "eagle3"), ("small", "draft_model"), ("further", "mtp")],
)
def test_method_follows_from_the_tensors_of_the_draft(tmp_path: Path, kind: str, method: str) -> None:
    config = drafting(tmp_path, kind)
    check_draft_model(config, read_config(tmp_path / "model"), tmp_path / "model")
    found = draft_arguments(config, tmp_path / "model")["speculative_config"]
    assert (found["method"], found["num_speculative_tokens"]) == (method, 3)
    assert found.get("model", "") == config.draft_model


def test_drafts_that_are_switched_have_lengths_for_every_batch(tmp_path: Path) -> None:
    config = drafting(tmp_path, "eagle", max_running=7)
    switched = draft_arguments(config, tmp_path / "model")
    assert switched["speculative_config"]["num_speculative_tokens_per_batch_size"] == [(1, 7, 3)]
    always = draft_arguments(drafting(tmp_path / "b", "eagle", drafts="model_always"), tmp_path / "b/model")
    assert always.keys() == {"speculative_config"}
    assert draft_arguments(EngineConfig(), tmp_path) == {}


def change(directory: Path, place: str, **values: object) -> None:
    """Change values of a config.json."""
    path = directory / place / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    ("kind", "spoil", "changes", "words"),
    [
        ("eagle", lambda d: change(d, "eagle", vocab_size=500), {}, "vocabulary has 500 tokens, and .* 512"),
        ("small", lambda d: change(d, "small", vocab_size=9), {}, "draft_model: .*vocabulary has 9 tokens"),
        ("eagle", lambda d: change(d, "eagle", hidden_size=64), {}, "hidden states of 64 elements, .* 128"),
        ("eagle3", lambda d: change(d, "eagle3", target_hidden_size=96), {}, "hidden states of 96 elements"),
        ("eagle3", lambda d: change(d, "model", hidden_size=160), {}, "hidden states of 128 elements"),
        ("eagle", lambda d: (d / "eagle/model.safetensors").unlink(), {}, "it holds no safetensors"),
        ("eagle", lambda d: (d / "eagle/config.json").unlink(), {}, r"setting engine\.draft_model: .*config"),
        ("eagle", lambda d: None, {"draft_model": "/nowhere"}, r"draft_model: .*/nowhere does not exist"),
        ("eagle", lambda d: None, {"draft_model": ""}, r"setting engine\.drafts: .* no layers that predict"),
        (
            "further",
            lambda d: (d / "model/further.safetensors").unlink(),
            {},
            r"setting engine\.drafts: .* no layers that predict further tokens \(MTP\)",
        ),
        (
            "further",
            lambda d: change(d, "model", num_nextn_predict_layers=2),
            {},
            r"setting engine\.num_speculative_tokens: 3 is not a multiple of the 2 layers",
        ),
        (
            "eagle",
            lambda d: None,
            {"tensor_parallel_size": 3},
            "tensor_parallel_size 3 does not divide its 4 heads",
        ),
        (
            "eagle",
            lambda d: (d / "model/model.safetensors").unlink(),
            {},
            r"setting engine\.drafts: .*model holds no safetensors",
        ),
    ],
)
def test_draft_that_does_not_fit_the_target_is_refused_by_name(
    tmp_path: Path, kind: str, spoil: Callable[[Path], object], changes: dict[str, Any], words: str
) -> None:
    config = drafting(tmp_path, kind, **changes)
    spoil(tmp_path)
    with pytest.raises(EngineSettingsError, match=words):
        check_draft_model(config, read_config(tmp_path / "model"), tmp_path / "model")


@pytest.mark.parametrize(("kind", "setting"), [("small", "draft_model"), ("further", "drafts")])
def test_path_by_which_vllm_would_choose_another_method_is_refused(
    tmp_path: Path, kind: str, setting: str
) -> None:
    place = tmp_path / "EAGLE3-runs"
    place.mkdir()
    config = drafting(place, kind)
    with pytest.raises(EngineSettingsError, match=rf"setting engine\.{setting}: .* because 'eagle3' is in"):
        check_draft_model(config, read_config(place / "model"), place / "model")
    head = drafting(tmp_path, "eagle3")  # vLLM is told which it is
    check_draft_model(head, read_config(tmp_path / "model"), tmp_path / "model")


def test_adapters_exclude_a_model_that_drafts_and_not_the_history(tmp_path: Path) -> None:
    config, lora = drafting(tmp_path, "eagle"), LoraConfig(rank=4)
    model = read_config(tmp_path / "model")
    with pytest.raises(EngineSettingsError, match=r"setting engine\.drafts: 'model' .* lora\.rank"):
        check_draft_model(config, model, tmp_path / "model", lora)
    check_draft_model(EngineConfig(drafts="history"), model, tmp_path / "model", lora)


def test_format_of_speculators_is_read(tmp_path: Path) -> None:
    config = drafting(tmp_path, "eagle3")
    path = tmp_path / "eagle3/config.json"
    layer = json.loads(path.read_text())
    path.write_text(json.dumps({"speculators_model_type": "eagle3", "transformer_layer_config": layer}))
    check_draft_model(config, read_config(tmp_path / "model"), tmp_path / "model")
    change(tmp_path, "eagle3", transformer_layer_config={**layer, "vocab_size": 3})
    with pytest.raises(EngineSettingsError, match="vocabulary has 3 tokens"):
        check_draft_model(config, read_config(tmp_path / "model"), tmp_path / "model")


def add(directory: Path, name: str, shape: tuple[int, ...]) -> None:
    """Add a tensor to the files of a head, or replace it."""
    path = directory / "eagle/model.safetensors"
    save_file({**load_file(path), name: torch.zeros(shape)}, path)


@pytest.mark.parametrize(
    ("kind", "spoil", "words"),
    [
        ("eagle3", lambda d: None, "trains an EAGLE head of model_type llama alone"),
        ("small", lambda d: None, "trains an EAGLE head of model_type llama alone"),
        ("eagle", lambda d: change(d, "eagle", model_type="qwen2"), "EAGLE head of model_type llama alone"),
        (
            "eagle",
            lambda d: add(d, "embed_tokens.weight", (512, 128)),
            r"embed_tokens\.weight is .*be absent",
        ),
        (
            "eagle",
            lambda d: change(d, "eagle", head_dim=64),
            r"layers\.0\.self_attn\.k_proj\.weight is \[64, 128\], and must be \[128, 128\]",
        ),
    ],
)
def test_draft_that_cannot_be_trained_is_refused_by_name(
    tmp_path: Path, kind: str, spoil: Callable[[Path], object], words: str
) -> None:
    fixed, trained = drafting(tmp_path, kind), drafting(tmp_path / "b", kind, draft_lr=1e-4)
    check_draft_model(drafting(tmp_path / "c", "eagle", draft_lr=1e-4), *target_of(tmp_path / "c"))
    spoil(tmp_path / "b")
    check_draft_model(fixed, *target_of(tmp_path))
    with pytest.raises(
        EngineSettingsError, match=rf"setting engine\.draft_model: .* engine\.draft_lr .*{words}"
    ):
        check_draft_model(trained, *target_of(tmp_path / "b"))


def target_of(directory: Path) -> tuple[dict[str, Any], Path]:
    """Return config.json and directory of the target."""
    return read_config(directory / "model"), directory / "model"
