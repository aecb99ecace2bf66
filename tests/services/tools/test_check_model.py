"""Tests `tether check-model`: models that work, are damaged, or are not supported, and bad requests."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from protocol.errors import SettingsError
from services.cli import app
from services.tools.check_model import (
    ModelVerdict,
    check_memory,
    check_model,
    layout_of,
    render_checked_model,
)
from tests.changes import slow_unless_changed
from tests.integration.command import tether_here
from tests.services.preflight.test_check import found, model_in, with_model
from tests.trainer.backends.quantised_models import describe, save_fp8, save_mxfp4
from tests.trainer.fsdp.tiny_models import save_tiny
from tests.trainer.megatron.models import HYBRIDS, MODELS, MORE_MODELS, make_config, make_model, save_model
from trainer.megatron.families.table import FAMILIES

FAMILY_MODELS = (*MODELS, *MORE_MODELS)
EXPERT_MODELS = (
    "qwen3-moe",
    "qwen2-moe",
    "mixtral",
    "deepseek-v3",
    "deepseek-v2",
    "glm4-moe",
    "gpt-oss",
    "qwen3-next",
)


def change_tensors(model_dir: Path, **changes: torch.Tensor) -> None:
    path = model_dir / "model.safetensors"
    save_file({**load_file(path), **changes}, path)


def checked_on_ranks(model_dir: Path, **sizes: int) -> str:
    """Return the answer for a model that works; its ranks are forks."""
    done = tether_here("check-model", model_dir, *(f"--{name}={size}" for name, size in sizes.items()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("OK\n")
    return done.stdout


def test_check_model_ends_with_0_where_a_model_works(tmp_path: Path) -> None:
    # heads of 32, which vLLM has on a CPU
    make_model("qwen2-tied", num_attention_heads=2).bfloat16().save_pretrained(tmp_path / "model")
    table = load_file(tmp_path / "model/model.safetensors")["model.embed_tokens.weight"]
    change_tensors(tmp_path / "model", **{"lm_head.weight": table.clone()})
    answer = CliRunner().invoke(app, ["check-model", str(tmp_path / "model")])
    assert answer.exit_code == 0, answer.output
    verdict, model, config, engines, layout, logits, export = answer.stdout.splitlines()
    assert verdict == "OK"
    assert "qwen2 (Qwen2ForCausalLM)" in model
    assert config.startswith("config   layers 2, hidden 64, ")
    assert config.endswith("tied, norm_eps 1e-06, max_positions 128, rope (theta 10000.0)")
    assert engines == "engines  hf; vllm lists it"
    assert "tensor 1 x pipeline 1: 1 rank(s)" in layout
    assert "8 packed random samples (at most 128 tokens) equal Hugging Face's in float32" in logits
    assert "26 tensors equal the checkpoint's bit for bit" in export
    assert "from bfloat16 to float32; not needed, not compared: lm_head.weight" in export


def test_check_model_says_of_an_engine_what_the_check_of_a_run_says(tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    settings = with_model(tmp_path / "run", model_in(tmp_path / "model", **windows), "engine.name=vllm")
    (text,) = [text for text in found(settings) if "sliding window in some layers" in text]
    answer = check_model(tmp_path / "model")
    assert answer.facts["engines"] == {"vllm": False}
    (cause,) = answer.facts["refusals"].values()
    assert cause in text
    assert f"engines  hf; vllm refuses it: {cause}" in render_checked_model(answer)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "head_dim 8 is not supported by vLLM on a CPU"),
        ({"model_type": "phi", "architectures": ["PhiForCausalLM"]}, "'vllm' cannot serve the phi"),
    ],
)
def test_check_model_refuses_for_an_engine_what_the_check_of_a_run_refuses_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = with_model(tmp_path / "run", model_in(tmp_path / "model", **changes), "engine.name=vllm")
    (text,) = [text for text in found(settings, local=True) if words in text]
    answer = check_model(tmp_path / "model")
    assert answer.facts["engines"] == {"vllm": False}
    assert answer.facts["refusals"]["vllm"] in text


@pytest.mark.parametrize("save", [save_fp8, save_mxfp4])
def test_check_model_checks_the_copy_of_a_quantised_model(
    tmp_path: Path, save: Callable[[Path], Path]
) -> None:
    found = check_model(save(tmp_path / "model"))
    assert (found.verdict, found.problem) == (ModelVerdict.WORKS, "")
    assert found.facts["model"] == str(tmp_path / "model")


def test_check_model_names_a_method_that_is_not_read(tmp_path: Path) -> None:
    describe(save_fp8(tmp_path / "model"), quant_method="awq")
    found = check_model(tmp_path / "model")
    assert found.verdict is ModelVerdict.UNSUPPORTED
    assert "'awq'; checkpoints of fp8 and mxfp4 are read" in found.problem


def test_check_model_ends_with_1_where_a_tied_output_layer_is_not_the_embedding(tmp_path: Path) -> None:
    model_dir = save_model("qwen2-tied", tmp_path)
    change_tensors(model_dir, **{"lm_head.weight": torch.zeros(96, 64)})
    answer = CliRunner().invoke(app, ["check-model", str(model_dir)])
    assert answer.exit_code == 1
    assert "lm_head.weight is not model.embed_tokens.weight, though config.json says tie" in answer.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_check_model_compares_on_the_ranks_of_a_layout(tmp_path: Path, tp: int, pp: int) -> None:
    found = checked_on_ranks(save_model("qwen3-tied", tmp_path), tp=tp, pp=pp)
    assert f"tensor {tp} x pipeline {pp}: 2 rank(s)" in found
    assert "export   24 tensors equal" in found


@pytest.mark.slow
def test_check_model_compares_the_chunks_of_a_virtual_pipeline(tmp_path: Path) -> None:
    found = checked_on_ranks(save_model("qwen3-deep", tmp_path), pp=2, vpp=2)
    assert "tensor 1 x pipeline 2 x virtual 2: 2 rank(s)" in found
    assert "export   46 tensors equal" in found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_check_model_compares_experts_on_several_ranks(tmp_path: Path, name: str) -> None:
    model_dir = save_model(name, tmp_path)
    found = checked_on_ranks(model_dir, tp=2, ep=2)
    assert "tensor 2 x pipeline 1 x expert 2: 2 rank(s)" in found
    assert f"export   {len(load_file(model_dir / 'model.safetensors'))} tensors equal" in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(name, sizes, id=f"{label}-{name}")
        for label, sizes in (("cp2", {"cp": 2}), ("tp2-pp2", {"tp": 2, "pp": 2}))
        for name in FAMILY_MODELS
        if label != "cp2" or name not in HYBRIDS
    ],
)
def test_check_model_passes_for_every_family(tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    assert f"{math.prod(sizes.values())} rank(s)" in checked_on_ranks(save_model(name, tmp_path), **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERT_MODELS)
def test_check_model_passes_for_every_family_with_experts(tmp_path: Path, name: str) -> None:
    assert "x expert 2: 2 rank(s)" in checked_on_ranks(save_model(name, tmp_path), ep=2)


def test_check_model_is_tried_with_every_family() -> None:
    kinds = {make_config(name).model_type for name in FAMILY_MODELS}
    assert kinds == set(FAMILIES)
    assert {make_config(name).model_type for name in EXPERT_MODELS} == {
        kind for kind, family in FAMILIES.items() if family.experts is not None
    }


@pytest.mark.parametrize(
    ("name", "shape", "problem"),
    [
        (
            "model.norm.weight",
            (3,),
            "model.norm.weight has shape (3,), but by config.json it should be (64,)",
        ),
        ("model.layers.0.self_attn.sinks", (4,), "no rule of qwen2 maps model.layers.0.self_attn.sinks"),
    ],
)
def test_check_model_names_the_tensor_that_config_json_does_not_expect(
    tmp_path: Path, name: str, shape: tuple[int, ...], problem: str
) -> None:
    model_dir = save_model("qwen2", tmp_path)
    change_tensors(model_dir, **{name: torch.zeros(shape)})
    answer = CliRunner().invoke(app, ["check-model", str(model_dir), "--json"])
    facts = json.loads(answer.stdout)
    assert (answer.exit_code, facts["works"], facts["verdict"]) == (1, False, "NOT A WHOLE CHECKPOINT")
    assert problem in facts["problem"]


def test_check_model_names_a_file_that_is_cut_off(tmp_path: Path) -> None:
    model_dir = save_model("qwen2", tmp_path)
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    assert check_model(model_dir).verdict is ModelVerdict.DAMAGED


def test_check_model_gives_the_reason_for_which_a_model_is_not_supported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    answer = CliRunner().invoke(app, ["check-model", str(tmp_path)])
    assert answer.exit_code == 1
    assert answer.stdout.startswith("NOT SUPPORTED: ")
    assert "model_type 'mamba' is not supported; supported are" in answer.stdout


def test_check_model_refuses_what_it_cannot_answer(tmp_path: Path) -> None:
    model_dir = save_model("qwen2", tmp_path)
    with pytest.raises(SettingsError, match="give the directory of a Hugging Face checkpoint"):
        check_model(tmp_path / "nothing")
    with pytest.raises(SettingsError, match="--tp 3 does not divide the model's 4 attention heads"):
        check_model(model_dir, layout_of(tp=3))
    with pytest.raises(SettingsError, match="does not divide the model's 2 layers"):
        check_model(model_dir, layout_of(pp=3))
    with pytest.raises(SettingsError, match=r"expert_model_parallel_size: 2, but the model has no experts"):
        check_model(model_dir, layout_of(ep=2))
    with pytest.raises(SettingsError, match="= 8 does not divide the 4 experts"):
        check_model(save_model("mixtral", tmp_path), layout_of(ep=8))
    with pytest.raises(SettingsError, match="--backend fsdp is checked on one rank: leave --tp"):
        check_model(model_dir, layout_of(tp=2), backend="fsdp")


def test_check_memory_refuses_a_model_that_does_not_fit(tmp_path: Path) -> None:
    assert check_memory(tmp_path, 1 << 20, 1) == 8 / 1024
    with pytest.raises(SettingsError, match=r"1,000,000,000,000 parameters takes about 7450\.6 GiB"):
        check_memory(tmp_path, 10**12, 1)


@slow_unless_changed(
    "trainer/model_check", "trainer/fsdp/", "trainer/layers/", "services/tools/", "protocol/device/hf_models",
)  # fmt: skip
@pytest.mark.parametrize(
    ("model_type", "sizes", "laid_out"),
    [
        # the plain scan fills chunks, of 256 tokens by default
        ("granitemoehybrid", {"mamba_chunk_size": 16}, "8 padded (layers of the types linear_attention)"),
        ("granite", {}, "8 packed"),
        ("gemma3", {}, "layers 2, hidden 64, vocabulary 96"),  # in the configuration of its text model
    ],
)
def test_check_model_compares_what_only_transformers_has(
    tmp_path: Path, model_type: str, sizes: dict[str, int], laid_out: str
) -> None:
    model_dir = save_tiny(model_type, tmp_path, **sizes)
    refused = check_model(model_dir)
    assert refused.verdict == ModelVerdict.UNSUPPORTED
    assert refused.problem.endswith("--backend fsdp checks it for trainer.backend 'fsdp'")
    found = check_model(model_dir, backend="fsdp")
    assert (found.verdict, found.problem) == (ModelVerdict.WORKS, "")
    assert laid_out in render_checked_model(found)


def test_check_model_refuses_what_generates_no_text_and_what_transformers_cannot_run(tmp_path: Path) -> None:
    reasons = {
        "bert": "model_type 'bert' is not causal",
        "xlm": "transformers cannot make a pass of it: 'bool' object has no attribute",
    }
    for model_type, reason in reasons.items():
        found = check_model(save_tiny(model_type, tmp_path), backend="fsdp")
        assert found.verdict == ModelVerdict.UNSUPPORTED
        assert reason in found.problem
        assert not dist.is_initialized()


def test_check_model_names_a_tensor_that_transformers_does_not_read(tmp_path: Path) -> None:
    model_dir = save_tiny("granite", tmp_path)
    change_tensors(model_dir, **{"model.layers.0.extra.weight": torch.zeros(2)})
    found = check_model(model_dir, backend="fsdp")
    assert found.verdict == ModelVerdict.DIFFERENT
    assert found.problem == "model.layers.0.extra.weight of the checkpoint is not exported"
