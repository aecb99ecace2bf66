"""Tests the expected memory of sharded models against tensors that passes of transformers keep."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from protocol.weights.lora import LoraConfig
from tests.trainer.fsdp.tiny_models import save_tiny
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.fsdp.layout import plan_of
from trainer.fsdp.memory.expected import (
    FLOAT32,
    STAYS_BYTES,
    ModelSize,
    ShardedWorkload,
    read_size,
    stays_gathered,
)
from trainer.memory.expected import GIB, LIBRARIES, largest_budget, refusal

TOKENS = 48
TYPES = ["llama", "qwen3", "gemma2", "gpt2", "qwen3_moe", "mixtral", "qwen3_next", "qwen3_5_text"]
WIDE = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "n_embd": 128, "n_inner": 384}
"""Sizes in which a model's norms and scores are not most of it."""
SIZE = ModelSize.of(
    {
        "embed.weight": (1000, 64),
        "layers.0.up.weight": (256, 64),
        "layers.1.up.weight": (256, 64),
        "layers.1.down.weight": (64, 256),
        "norm.weight": (64,),
    },
    {"hidden_size": 64, "vocab_size": 1000},
)


def workload(ranks: int = 1, **changes: object) -> ShardedWorkload:
    values: dict[str, object] = {
        "model": SIZE,
        "parallel": ParallelConfig(data_parallel_size=ranks),
        "trainer": TrainerConfig(dtype="bfloat16"),
        "optimizer": OptimizerConfig(),
    }
    return ShardedWorkload(**{**values, **changes})  # type: ignore[arg-type]


def test_numbers_of_a_model_are_those_of_its_tensors() -> None:
    large = 256 * 64
    assert (SIZE.layers, SIZE.layer, SIZE.outside) == (2, 2 * large, 64_064)
    assert SIZE.parameters == 3 * large + 64_064
    assert (SIZE.kept, SIZE.kept_of_layer) == (3 * 320, 2 * 320)


def test_numbers_that_are_rounded_to_fp8_take_a_layers_float32() -> None:
    plain = workload()
    rounded = workload(trainer=replace(plain.trainer, fp8="rowwise"))
    more = rounded.expected(TOKENS).workspace - plain.expected(TOKENS).workspace
    assert more == FLOAT32 * (TOKENS * SIZE.kept_of_layer + SIZE.layer)


def test_parameters_stay_gathered_on_one_rank_up_to_a_limit() -> None:
    trainer = workload().trainer
    assert stays_gathered(STAYS_BYTES, 1, trainer)
    assert not stays_gathered(STAYS_BYTES + 1, 1, trainer)
    assert not stays_gathered(0, 2, trainer)
    assert not stays_gathered(0, 1, replace(trainer, offload_parameters=True))


def test_compiled_layers_keep_half_unless_they_have_state_or_experts() -> None:
    compiled = TrainerConfig(dtype="bfloat16", compile=True)
    activations = workload().expected(TOKENS).activations
    assert workload(trainer=compiled).expected(TOKENS).activations == activations // 2
    for kind in ("has_state", "has_experts"):
        model = replace(SIZE, **{kind: True})
        found = workload(model=model, trainer=compiled).expected(TOKENS).activations
        assert found == workload(model=model).expected(TOKENS).activations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", TYPES)
def test_expected_activations_bound_the_tensors_that_transformers_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, dtype: torch.dtype
) -> None:
    from tests.trainer.fsdp import tiny_models

    monkeypatch.setattr(tiny_models, "SIZES", tiny_models.SIZES | WIDE)
    model_dir = save_tiny(model_type, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.get_decoder()(input_ids=torch.arange(TOKENS)[None], use_cache=False)
    found = sum(storage.nbytes() for key, storage in kept.items() if key not in own)
    trainer = TrainerConfig(dtype="float32" if dtype is torch.float32 else "bfloat16")
    expected = workload(model=read_size(model_dir), trainer=trainer).expected(TOKENS).activations
    assert found <= expected <= 2 * found


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_rank_has_its_share_of_float32_parameters_gradients_and_moments(ranks: int) -> None:
    found = workload(ranks).expected(1024)
    share = SIZE.parameters * FLOAT32 // ranks
    assert (found.gradients, found.optimizer) == (share, 2 * share)
    gathered = SIZE.parameters if ranks == 1 else SIZE.outside + 3 * SIZE.layer
    assert found.parameters == share + 2 * gathered


def test_tensor_parallel_ranks_divide_what_the_plan_does() -> None:
    shapes = {
        "model.embed_tokens.weight": (1000, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.self_attn.o_proj.weight": (64, 64),
        "model.layers.0.mlp.experts.0.up_proj.weight": (256, 64),
        "model.layers.0.mlp.gate.weight": (4, 64),
    }
    config = {"model_type": "qwen3_moe", "hidden_size": 64, "vocab_size": 1000, "num_experts": 1}
    half = ModelSize.of(shapes, config, plan_of(config), 2)
    assert (half.whole, half.outside) == (64_000 + half.layer * 2 - 4 * 64, 64_000)
    assert half.layer == 64 * 64 + 128 * 64 + 4 * 64
    assert half.kept == 2 * (64 + 32) + (64 + 128) + (4 + 64)
    two = ParallelConfig(tensor_model_parallel_size=2)
    found = workload(model=half, parallel=two).expected(64)
    assert found.optimizer == 2 * FLOAT32 * half.parameters
    assert found.activations < workload(model=ModelSize.of(shapes, config)).expected(64).activations


def test_each_setting_that_saves_memory_does() -> None:
    plain = workload().expected(4096)
    named = dict(workload().alternatives())
    assert [name.count(" and ") for name in named] == [0, 0, 1, 2]
    peaks = [work.expected(4096).peak for work in named.values()]
    assert all(peak < plain.peak for peak in peaks)
    assert min(peaks) == peaks[-1]
    held = list(named.values())[-1].expected(4096)
    assert (held.gradients, held.optimizer) == (0, 0)
    assert not list(list(named.values())[-1].alternatives())


def test_adapters_and_other_models_are_counted() -> None:
    base = workload(adapters=LoraConfig(rank=4)).expected(64)
    assert base.gradients == FLOAT32 * 4 * SIZE.kept
    assert base.parameters > FLOAT32 * SIZE.parameters
    dropped = workload(adapters=LoraConfig(rank=4, dropout=0.1)).expected(64)
    assert dropped.activations > base.activations
    other = workload(2, others=(1000,)).expected(64)
    assert other.parameters == workload(2).expected(64).parameters + 1000
    critic = workload(critic=SIZE).expected(64)
    assert critic.optimizer == 2 * workload().expected(64).optimizer


def test_budget_and_refusal_are_those_of_all_backends() -> None:
    work = workload()
    room = work.expected(4096).peak
    assert largest_budget(work, room) == 4096
    text = refusal(work, LIBRARIES)
    assert "no setting of one rank would fit" in text
    text = refusal(replace(work, model=replace(SIZE, parameters=GIB)), 8 * GIB)
    assert "optimizer.cpu_offload = true and trainer.offload_parameters = true, up to" in text


def test_the_expected_memory_is_computed_without_torch() -> None:
    code = "import sys, trainer.fsdp.memory.expected; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
