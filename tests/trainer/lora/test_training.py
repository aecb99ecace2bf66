"""Tests that every backend and layout trains the adapter that differentiating the merged weights gives."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig, adapter_shapes, adapter_targets
from tests.changes import slow_unless_changed
from tests.trainer.checkpoints import save_part
from tests.trainer.exports import read_export
from tests.trainer.lora.oracle import ALGORITHM, LORA, STEPS, targets_of, trained_by_hand
from tests.trainer.lora.ranks import make_backend, run
from tests.trainer.megatron.launch import launch
from tests.trainer.megatron.layouts import LAYOUTS
from tests.trainer.megatron.models import (
    ALL_MODELS,
    OPTIMIZER,
    make_batch,
    make_config,
    make_model,
    save_model,
)
from trainer.backends.base import Backend
from trainer.config import TrainerConfig
from trainer.lora import as_published, merged, save_adapter
from trainer.megatron.convert.adapters import lora_rules
from trainer.megatron.families.reading import architecture_of
from trainer.megatron.families.stages import stage_rules
from trainer.megatron.layout import Layout
from trainer.reference.backend import ReferenceBackend
from trainer.storage.hf_export import write_hf
from trainer.storage.host_state import HostCopies

LATENT = "deepseek-v3-dense"
CHANGED = slow_unless_changed(
    "trainer/lora.py", "trainer/megatron/", "trainer/layers/", "tests/trainer/lora/"
)
SLOW = [
    pytest.param(name, layout, marks=pytest.mark.slow)
    for name, layout in (
        *(("qwen2", layout) for layout in ("tp2", "pp2", "dp2", "cp2", "tp2-pp2")),
        *(
            (name, "tp2-sequence")
            for name in ("gemma2", "glm4", "phi", "starcoder2", "qwen3-windows", "qwen3.5", LATENT)
        ),
        ("qwen3-deep", "pp2-vpp2"),
    )
]


def reference(model_dir: Path, adapters: LoraConfig = LORA, **trainer: object) -> ReferenceBackend:
    config = TrainerConfig(micro_batch_size=7, device="cpu", **trainer)
    return ReferenceBackend(
        model_dir, optimizer=OPTIMIZER, trainer=config, algorithm=ALGORITHM, adapters=adapters
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2", "single"),
        ("qwen2", "tp2-sequence"),
        pytest.param("gemma2", "single", marks=CHANGED),
        pytest.param("starcoder2", "single", marks=CHANGED),
        (LATENT, "single"),
        *SLOW,
    ],
)
@pytest.mark.xdist_group("layouts")  # one process forks the ranks of all
def test_a_layout_trains_what_the_merged_weights_say(name: str, layout: str, tmp_path: Path) -> None:
    model_dir, out = save_model(name, tmp_path), tmp_path / layout
    run("single", name, model_dir, tmp_path / "single")
    if layout != "single":
        ranks = LAYOUTS[layout].world_size
        arguments = layout, name, str(model_dir), str(out), "0"
        launch(ranks, "tests.trainer.lora.ranks", *arguments, logs=tmp_path / "logs")
    losses, expected = trained_by_hand(name)
    facts, found = json.loads((out / "facts.json").read_text()), load_file(out / "after.safetensors")
    assert facts["losses"] == pytest.approx(losses, abs=2e-5)
    assert list(found) == sorted(expected)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert facts["reference"]  # the reference model has no adapter
    again = load_file(out / "again.safetensors")
    assert [key for key in found if not torch.equal(found[key], again[key])] == []
    torch.testing.assert_close(load_file(out / "moved.safetensors"), found, atol=1e-5, rtol=0)
    check_merged_model(name, out / "hf", found)


def check_merged_model(name: str, directory: Path, adapter: dict[str, torch.Tensor]) -> None:
    targets = {target.weight: target for target in targets_of(name)}
    exported, source = read_export(directory), dict(make_model(name).named_parameters())
    assert exported.keys() == source.keys()
    for key, weight in source.items():
        if key in targets:
            assert not torch.equal(exported[key], weight)
            torch.testing.assert_close(
                exported[key], merged(targets[key], weight.detach(), adapter, LORA), atol=0, rtol=0
            )
        else:
            assert torch.equal(exported[key], weight)


@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_the_reference_trains_what_the_merged_weights_say(name: str, tmp_path: Path) -> None:
    backend = reference(save_model(name, tmp_path))
    backend.keep_reference()
    before = backend.logprobs(make_batch(name, 0))
    found = [backend.train_step(make_batch(name, step)).loss for step in range(STEPS)]
    losses, expected = trained_by_hand(name)
    assert found == pytest.approx(losses, abs=2e-5)
    torch.testing.assert_close(dict(backend.export()), expected, atol=1e-5, rtol=0)
    assert torch.equal(backend.reference_logprobs(make_batch(name, 0)), before)
    assert not torch.equal(backend.logprobs(make_batch(name, 0)), before)


def test_the_reference_resumes_bit_for_bit_and_refuses_another_rank(tmp_path: Path) -> None:
    backend = reference(save_model("llama", tmp_path))
    backend.train_step(make_batch("llama", 0))
    save_part(backend, tmp_path)
    backend.train_step(make_batch("llama", 1))
    expected = {name: tensor.clone() for name, tensor in backend.export()}
    backend.restore(tmp_path)
    backend.train_step(make_batch("llama", 1))
    assert [name for name, tensor in backend.export() if not torch.equal(tensor, expected[name])] == []
    with pytest.raises(SettingsError, match=r"rank 4 .* rank 2"):
        reference(tmp_path / "llama", LoraConfig(rank=2)).restore(tmp_path)
    with pytest.raises(SettingsError, match="lora none"):
        reference(tmp_path / "llama", NO_ADAPTERS).restore(tmp_path)


def test_a_saved_adapter_and_the_merged_model_say_the_same(tmp_path: Path) -> None:
    backend = reference(save_model("llama", tmp_path))
    for step in range(STEPS):
        backend.train_step(make_batch("llama", step))
    save_adapter(backend.export(), tmp_path / "adapter", LORA, tmp_path / "llama")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 6.0)
    assert {name: tuple(t.shape) for name, t in saved.items()} == adapter_shapes(targets_of("llama"), 4)
    write_hf(backend.export_model(), tmp_path / "hf", tmp_path / "llama")
    whole = reference(tmp_path / "hf", NO_ADAPTERS)
    torch.testing.assert_close(
        whole.logprobs(make_batch("llama", 9)), backend.logprobs(make_batch("llama", 9)), atol=1e-5, rtol=0
    )


RSLORA = LoraConfig(rank=3, alpha=6.0, use_rslora=True)


@pytest.fixture
def given(tmp_path: Path) -> tuple[LoraConfig, dict[str, torch.Tensor]]:
    """An adapter in PEFT's format as its library would write it, B not scaled; and its tensors."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=generator)
        for name, shape in adapter_shapes(targets_of("llama", RSLORA), RSLORA.rank).items()
    }
    save_adapter(tensors.items(), tmp_path / "given", RSLORA, tmp_path / "llama")
    return replace(RSLORA, path=str(tmp_path / "given")), tensors


@pytest.mark.parametrize("kind", ["reference", "megatron"])
def test_training_starts_from_a_given_adapter(
    kind: str, given: tuple[LoraConfig, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    lora, tensors = given
    model_dir = save_model("llama", tmp_path)
    backend: Backend = (
        reference(model_dir, lora)
        if kind == "reference"
        else make_backend("llama", model_dir, "single", lora)
    )
    try:
        found = dict(backend.export())
        assert found.keys() == tensors.keys()
        assert [name for name in found if not torch.equal(found[name], tensors[name])] == []
        model = HostCopies().copy_all(backend.export_model())
    finally:
        backend.close()
    source = dict(make_model("llama").named_parameters())
    for target in targets_of("llama", lora):
        change = (RSLORA.alpha / RSLORA.rank**0.5) * (tensors[target.b] @ tensors[target.a])  # as PEFT merges
        assert torch.equal(model[target.weight], source[target.weight] + change)


def test_published_adapter_is_what_the_merged_weights_add(
    given: tuple[LoraConfig, dict[str, torch.Tensor]],
) -> None:
    lora, tensors = given
    published = dict(as_published(tensors.items(), targets_of("llama", lora), lora))
    unscaled = replace(lora, alpha=float(lora.rank), use_rslora=False)
    for target in targets_of("llama", lora):
        weight = torch.zeros(target.shape)
        torch.testing.assert_close(
            merged(target, weight, published, unscaled), merged(target, weight, tensors, lora)
        )


@pytest.mark.parametrize("name", sorted(ALL_MODELS))
def test_all_linear_is_what_the_megatron_backend_has_adapters_for(name: str, tmp_path: Path) -> None:
    architecture = architecture_of(make_config(name).to_dict(), tmp_path / "config.json")
    rules = stage_rules(architecture, Layout.of(LAYOUTS["single"], architecture.layers), 0)
    found = lora_rules(rules, LORA)
    assert {rule.parameter.rpartition(".lora.")[0] for rule in found}


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (LoraConfig(rank=4, target_modules=("q_proj", "qproj")), "no linear layer qproj"),
        (LoraConfig(rank=-1), "rank -1"),
        (LoraConfig(rank=4, alpha=0), "alpha 0"),
        (LoraConfig(rank=4, target_modules=()), "no linear layer"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(lora: LoraConfig, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        adapter_targets({"model.layers.0.self_attn.q_proj.weight": (8, 8)}, lora)
