"""Tests `tether size`: by config.json alone, and against Hugging Face's own counts."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config
from typer.testing import CliRunner

from protocol.errors import SettingsError
from services.cli import app
from services.tools.size import render_sizes, size_run
from tests.integration.loop import ROOT
from tests.trainer.megatron.models import make_model, save_model
from trainer.config import ParallelConfig
from trainer.memory.expected import GIB

CONFIG = str(ROOT / "deploy/examples/gsm8k/eight_gpus.toml")
DEMO = str(ROOT / "deploy/configs/demo.toml")
QWEN_7B = Qwen2Config(
    vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=32_768, tie_word_embeddings=False,
    architectures=["Qwen2ForCausalLM"],
)  # fmt: skip


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """Settings of a 7B model whose weights are not here."""
    QWEN_7B.save_pretrained(tmp_path)
    return [
        f'model.path="{tmp_path}"', "engine.max_model_len=4096", "engine.dtype=bfloat16",
        "trainer.dtype=bfloat16",
    ]  # fmt: skip


def test_parameters_and_cache_are_the_sizes_that_hugging_face_makes(
    overrides: list[str], tmp_path: Path
) -> None:
    sizes = size_run(CONFIG, overrides, gpus=4, gpu_gb=80)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sizes.parameters == sum(weight.numel() for weight in model.parameters())
    one = sizes.engines[0]
    keys_and_values = 2 * 28 * 4 * 128  # numbers of a token: layers, key heads, dimensions
    assert one.token == 2 * keys_and_values
    assert one.weights == 2 * 2 * sizes.parameters
    assert one.cache == int(80 * GIB * one.memory_fraction) - 2 * sizes.parameters - 2 * GIB
    assert one.weights // 2 + int(80 * GIB * one.memory_fraction) < 80 * GIB


def test_a_model_of_transformers_is_sharded_over_all_gpus(tmp_path: Path) -> None:
    model_dir = save_model("qwen2", tmp_path)
    given = ["trainer.backend=fsdp", f'model.path="{model_dir}"']
    given += ["algorithm.kl_coef=0.1", "placement.reference=2"]
    sizes = size_run(CONFIG, given, gpus=5, gpu_gb=80)
    (layout,) = sizes.layouts
    assert layout.parallel == ParallelConfig(data_parallel_size=3)
    assert sizes.parameters == sum(weight.numel() for weight in make_model("qwen2").parameters())
    assert sizes.apart == {"reference": 2 * sizes.parameters // 2}  # bfloat16
    assert sizes.engines == []
    halves = [*given[:2], "parallel.tensor_model_parallel_size=2"]
    (layout,) = size_run(CONFIG, halves, gpus=4, gpu_gb=80).layouts
    assert layout.parallel == ParallelConfig(data_parallel_size=2, tensor_model_parallel_size=2)
    with pytest.raises(SettingsError, match="size: 2: it does not divide the policy's 5 GPUs"):
        size_run(CONFIG, halves, gpus=5, gpu_gb=80)
    small = size_run(CONFIG, given, gpus=5, gpu_gb=0.01)
    assert small.remedy.startswith("the trainer does not fit on its device")
    assert "engine " not in render_sizes(small)
    ppo = [*given[:2], "algorithm.name=ppo", "placement.critic=2"]
    state = (4 + 4 + 8) / 2  # of a parameter on two GPUs: itself, its gradient, its moments
    assert size_run(CONFIG, ppo, gpus=5, gpu_gb=80).critic_apart > state * sizes.parameters


def test_gpus_of_models_of_their_own_are_not_the_policys(overrides: list[str]) -> None:
    two = ["algorithm.kl_coef=0.1", "placement.reference=2", "placement.reference_tensor_parallel_size=2"]
    sizes, whole = (size_run(CONFIG, [*overrides, *more], gpus=8, gpu_gb=80) for more in (two, []))
    assert {layout.parallel.world_size for layout in sizes.layouts} == {6}
    assert sizes.apart["reference"] == pytest.approx(2 * whole.parameters / 2, rel=1e-3)  # norms are whole
    assert (whole.apart, whole.critic_apart) == ({}, 0)
    with pytest.raises(SettingsError, match="it takes 2 GPUs of the trainer's 2"):
        size_run(CONFIG, [*overrides, *two], gpus=2, gpu_gb=80)


def test_a_critic_apart_takes_its_memory_from_gpus_of_its_own(overrides: list[str]) -> None:
    ppo = [*overrides, "algorithm.name=ppo"]
    beside, apart = (
        size_run(CONFIG, [*ppo, *more], gpus=8, gpu_gb=80) for more in ([], ["placement.critic=4"])
    )
    assert {layout.parallel.world_size for layout in apart.layouts} == {4}
    state = 2 + 4 + 12 / 4  # of a parameter: itself, its gradient, a part of its masters and moments
    assert apart.critic_apart > state * apart.parameters > 0 == beside.critic_apart
    assert "critic   on GPUs of its own: peak" in render_sizes(apart)


def test_layouts_use_all_gpus_hold_a_sample_and_come_with_the_fewest_ranks_first(
    overrides: list[str],
) -> None:
    sizes = size_run(CONFIG, overrides, gpus=8, gpu_gb=80)
    assert sizes.layouts
    assert sizes.remedy == ""
    for layout in sizes.layouts:
        assert layout.parallel.world_size == 8
        assert layout.parallel.tensor_model_parallel_size in (1, 2, 4)  # 8 does not divide 28 heads
        assert layout.tokens >= 4096
        assert layout.memory.peak <= 0.9 * 80 * GIB
    ranks = [layout.model_ranks for layout in sizes.layouts]
    assert ranks == sorted(ranks)


def test_a_model_that_fits_nowhere_gets_the_reason_and_a_remedy(overrides: list[str]) -> None:
    sizes = size_run(CONFIG, overrides, gpus=1, gpu_gb=24)
    assert not sizes.layouts
    assert "does not fit" in sizes.remedy
    answer = CliRunner().invoke(
        app,
        ["size", CONFIG, "--gpus", "1", "--gpu-memory", "24", *(w for o in overrides for w in ("--set", o))],
    )
    assert answer.exit_code == 0, answer.output
    assert sizes.remedy in answer.output
    assert "TP 1: weights 28.4 GiB a GPU; does not fit" in answer.output


def test_json_has_the_layouts(overrides: list[str]) -> None:
    words = [w for o in overrides for w in ("--set", o)]
    answer = CliRunner().invoke(app, ["size", CONFIG, "--gpus", "2", "--gpu-memory", "141", "--json", *words])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.output)
    assert found["layouts"][0]["parallel"]["data_parallel_size"] >= 1
    assert found["engines"][0]["tokens"] > 0


def test_a_backend_without_layouts_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"trainer\.backend: 'reference' has no layouts"):
        size_run(DEMO, ["trainer.backend=reference"], gpus=1, gpu_gb=80)
