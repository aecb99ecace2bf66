"""Tests the expected memory against parameters of a built model and sizes worked out by hand."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protocol.weights.lora import LoraConfig
from tests.trainer.megatron.models import ALL_MODELS, save_model
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.layers.limits import LOGITS_KEPT_BYTES, SCORES_CHUNK_BYTES
from trainer.megatron import cpu, parallel
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.families.rope import Rope
from trainer.megatron.layout import Layout
from trainer.megatron.memory.expected import (
    FrozenShape,
    Workload,
    bytes_of_layer,
    expected_memory,
    expert_parameters_of_stage,
    in_flight_passes,
    memory_of_stage,
    parameters_of_stage,
)
from trainer.megatron.model import DTYPES, build_model, transformer_config
from trainer.megatron.parallel import Position
from trainer.memory.expected import GIB

QWEN_7B = Architecture(
    model_type="qwen2",
    name="Qwen2ForCausalLM",
    layers=28,
    hidden=3584,
    intermediate=18944,
    heads=28,
    kv_heads=4,
    head_dim=128,
    vocabulary=152064,
    tied=False,
    norm_eps=1e-6,
    max_positions=32768,
    rope=Rope(1e6),
)
PARAMETERS_7B = 7_615_616_512


def workload(**changes: object) -> Workload:
    values: dict[str, object] = {
        "architecture": QWEN_7B,
        "parallel": ParallelConfig(),
        "trainer": TrainerConfig(dtype="bfloat16"),
        "optimizer": OptimizerConfig(),
    }
    return Workload(**{**values, **changes})  # type: ignore[arg-type]


def recomputing(granularity: str, **trainer: object) -> Workload:
    settings = TrainerConfig(dtype="bfloat16", recompute_granularity=granularity, **trainer)  # type: ignore[arg-type]
    return workload(trainer=settings)


@pytest.fixture(scope="module")
def position() -> Iterator[Position]:
    cpu.install()
    yield parallel.initialize(ParallelConfig(), "cpu", 0)
    parallel.finalize()


@pytest.mark.parametrize("name", ALL_MODELS)
def test_parameters_are_those_of_the_model_that_is_built(
    name: str, position: Position, tmp_path: Path
) -> None:
    architecture = read_architecture(save_model(name, tmp_path))
    model = build_model(architecture, transformer_config(architecture, position, DTYPES["float32"]), position)
    expected = parameters_of_stage(workload(architecture=architecture), 0)
    assert expected == sum(parameter.numel() for parameter in model.parameters())


def test_parameters_of_ranks_add_up_but_for_norms_and_padding() -> None:
    assert parameters_of_stage(workload(), 0) == PARAMETERS_7B
    parts = workload(parallel=ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2))
    norms = 2 * 28 * 2 * 3584 + 2 * 3584  # on either tensor rank
    total = 2 * (parameters_of_stage(parts, 0) + parameters_of_stage(parts, 1))
    assert total == PARAMETERS_7B + norms // 2


def test_parameters_of_ranks_with_experts_add_up_but_for_what_all_have(tmp_path: Path) -> None:
    architecture = read_architecture(save_model("qwen2-moe", tmp_path))
    alone = workload(architecture=architecture)
    layout = ParallelConfig(data_parallel_size=4, expert_model_parallel_size=2)
    parts = workload(architecture=architecture, parallel=layout)
    experts = 2 * 4 * 3 * 64 * 24
    assert expert_parameters_of_stage(alone, 0) == experts
    assert parameters_of_stage(parts, 0) == parameters_of_stage(alone, 0) - experts // 2
    shared = replace(layout, expert_tensor_parallel_size=2)
    assert expert_parameters_of_stage(replace(parts, parallel=shared), 0) == experts // 4
    stepped = (parameters_of_stage(alone, 0) - experts) // 4 + experts // 2 // 2
    assert expected_memory(parts, 1024).optimizer == 12 * stepped


def test_a_layer_with_experts_keeps_rows_of_each_of_them(tmp_path: Path) -> None:
    architecture = read_architecture(save_model("mixtral", tmp_path))
    work = workload(architecture=architecture)
    dense, sparse = (bytes_of_layer(work, 10, sparse=kind) for kind in (False, True))
    assert sparse - dense == 10 * (2 * 4 * 4 + 2 * (2 * 64 * 2 + 2 * 3 * 96 - 3 * 96))
    layers = expected_memory(work, 10).activations - 10 * 2 * (2 * 64 + 2 * 32)
    assert layers == 2 * sparse


def test_state_is_2_4_and_12_bytes_a_parameter_in_bfloat16() -> None:
    found = expected_memory(workload(), 1024)
    assert (found.parameters, found.gradients, found.optimizer) == tuple(
        item * PARAMETERS_7B for item in (2, 4, 12)
    )


def test_optimizer_in_host_memory_takes_nothing_on_the_device() -> None:
    found = expected_memory(workload(optimizer=OptimizerConfig(cpu_offload=True)), 1024)
    assert (found.optimizer, found.update) == (0, 0)


def test_gradients_in_bfloat16_take_half_but_become_float32_for_the_update() -> None:
    found = expected_memory(workload(optimizer=OptimizerConfig(grad_reduce_in_fp32=False)), 1024)
    assert (found.gradients, found.update) == (2 * PARAMETERS_7B, 4 * PARAMETERS_7B)


def test_data_parallel_ranks_share_the_optimizer_if_it_is_distributed() -> None:
    shared = expected_memory(workload(parallel=ParallelConfig(data_parallel_size=4)), 1024)
    assert shared.optimizer == 3 * PARAMETERS_7B
    each = ParallelConfig(data_parallel_size=4, use_distributed_optimizer=False)
    assert expected_memory(workload(parallel=each), 1024).optimizer == 12 * PARAMETERS_7B


def test_adapters_alone_have_gradients_and_state() -> None:
    rank = 16
    found = expected_memory(workload(adapters=LoraConfig(rank=rank)), 1024)
    q, k, h, f = 28 * 128, 4 * 128, 3584, 18944
    adapters = 28 * rank * ((h + q) + 2 * (h + k) + (q + h) + 2 * (h + f) + (f + h))
    assert (found.gradients, found.optimizer) == (4 * adapters, 12 * adapters)
    assert found.parameters == 2 * (PARAMETERS_7B + adapters)


def test_dropout_keeps_each_adapters_input_and_its_mask() -> None:
    plain, dropped = (
        bytes_of_layer(workload(adapters=LoraConfig(rank=4, dropout=p)), 1000) for p in (0, 0.1)
    )
    h, q, f = 3584, 28 * 128, 18944
    assert dropped - plain == 1000 * (3 * h + q + 2 * h + f) * (2 + 1)


def test_a_layer_keeps_what_its_rows_say() -> None:
    tokens, h, q, k, f = 1000, 3584, 28 * 128, 4 * 128, 18944
    by_hand = 2 * (4 * h + (q + 2 * k) + q + k + q + 3 * f) + 4 * 28
    assert bytes_of_layer(workload(), tokens) == tokens * by_hand
    without = 2 * (2 * h + 3 * f)
    assert bytes_of_layer(workload(), tokens, without=("layernorm", "mlp")) == tokens * (by_hand - without)


def test_recompute_keeps_less_the_more_it_computes() -> None:
    kept = [expected_memory(recomputing(name), 8192).activations for name in ("", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 3 * kept[1] > 6 * kept[2]
    one = expected_memory(recomputing("full", recompute_method="block", recompute_num_layers=1), 8192)
    assert kept[0] > one.activations > kept[0] * 26 / 28


def test_sequence_parallelism_divides_the_residual_stream_too() -> None:
    tensor, sequence = (
        workload(parallel=ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=divided))
        for divided in (False, True)
    )
    whole = bytes_of_layer(workload(), 1024)
    assert bytes_of_layer(sequence, 1024) == whole / 2
    assert bytes_of_layer(tensor, 1024) == whole / 2 + 1024 * 2 * 4 * 3584 / 2


def test_context_ranks_keep_the_keys_that_they_see_and_share_the_optimizer() -> None:
    alone, four = workload(), workload(parallel=ParallelConfig(context_parallel_size=4))
    seen = bytes_of_layer(four, 1024) - bytes_of_layer(alone, 1024)
    assert seen == 1024 * 4.5 * 2 * 4 * 128 * 2
    assert bytes_of_layer(four, 1024, without=("core_attn",)) == bytes_of_layer(
        alone, 1024, without=("core_attn",)
    )
    assert expected_memory(four, 1024).optimizer == 3 * PARAMETERS_7B


def test_the_first_stages_hold_more_micro_batches_and_only_the_last_has_the_head() -> None:
    work = workload(parallel=ParallelConfig(pipeline_model_parallel_size=4))
    first, last = memory_of_stage(work, 1024, 0), memory_of_stage(work, 1024, 3)
    assert (first.activations, first.head) == (4 * last.activations, 0)
    assert expected_memory(work, 1024).peak == max(first.peak, last.peak)


def test_a_virtual_pipeline_holds_a_group_for_each_chunk_but_the_last_and_the_rest_of_1f1b() -> None:
    layout = Layout.of(
        ParallelConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=3), 24
    )
    assert [in_flight_passes(layout, stage) for stage in range(4)] == [8 + 7, 8 + 5, 8 + 3, 8 + 1]
    plain = Layout.of(ParallelConfig(pipeline_model_parallel_size=4), 24)
    assert [in_flight_passes(plain, stage) for stage in range(4)] == [4, 3, 2, 1]


def test_a_stage_with_fewer_layers_holds_less() -> None:
    uneven = ParallelConfig(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        num_layers_in_first_pipeline_stage=8,
    )
    work = workload(parallel=uneven)
    norms, each = 3584, (parameters_of_stage(workload(), 0) - 2 * 152064 * 3584 - 3584) // 28
    assert [parameters_of_stage(work, stage) for stage in (0, 1)] == [
        8 * each + 152064 * 3584,
        20 * each + 152064 * 3584 + norms,
    ]
    first, last = (memory_of_stage(work, 1024, stage).activations for stage in (0, 1))
    ends = 2 * 1024 * 2 * 3584 + 2 * 1024 * 128 * 2
    assert first == 5 * (ends + 4 * bytes_of_layer(work, 1024))
    assert last == 3 * (ends + 10 * bytes_of_layer(work, 1024))


def test_the_peak_grows_with_the_budget_and_is_described_in_gib() -> None:
    peaks = [expected_memory(workload(), tokens).peak for tokens in (1024, 2048, 4096)]
    assert peaks == sorted(peaks)
    text = str(expected_memory(workload(), 1024))
    assert text.startswith(f"{peaks[0] / GIB:.1f} GiB (parameters 14.19, gradients 28.37, optimizer 85.11")


def test_a_reference_model_is_a_second_copy_of_the_parameters() -> None:
    assert expected_memory(workload(reference=True), 1024).parameters == 4 * PARAMETERS_7B


def test_masters_apart_take_four_bytes_in_float32() -> None:
    single = workload(trainer=TrainerConfig(dtype="float32"))
    assert expected_memory(single, 1024).optimizer == 8 * PARAMETERS_7B
    assert expected_memory(replace(single, shared=True), 1024).optimizer == 12 * PARAMETERS_7B


def test_the_head_has_at_most_the_logits_that_it_keeps() -> None:
    states, table = 2 * 3584 * 2, 152064 * 3584 * 2
    few, many = (expected_memory(workload(), tokens).head for tokens in (1024, 32768))
    assert few == 1024 * (152064 * 2 + states) + table
    assert many == LOGITS_KEPT_BYTES["cuda"] + 32768 * states + table


def test_bounded_scores_take_their_chunks_where_gradients_are_smaller() -> None:
    plain, bounded = (
        expected_memory(workload(architecture=replace(QWEN_7B, layers=1, score_softcap=softcap)), 1)
        for softcap in (0.0, 50.0)
    )
    assert plain.workspace < bounded.workspace == 3 * SCORES_CHUNK_BYTES


def test_the_expected_memory_is_computed_without_torch() -> None:
    code = "import sys, trainer.megatron.memory.expected; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_frozen_models_take_their_parameters_and_no_gradient() -> None:
    small = replace(QWEN_7B, layers=4)
    plain = expected_memory(workload(), 2048)
    resident = expected_memory(workload(frozen=(FrozenShape(small),)), 2048)
    extra = 2 * parameters_of_stage(workload(architecture=small), 0)
    assert resident.parameters - plain.parameters == extra
    assert resident.peak - plain.peak == extra
    assert (resident.gradients, resident.optimizer) == (plain.gradients, plain.optimizer)
    visiting = expected_memory(workload(frozen=(FrozenShape(small, offload=True),)), 2048)
    assert visiting.parameters == plain.parameters
    assert visiting.largest_offloaded == extra
    assert plain.peak <= visiting.peak <= resident.peak


def test_a_frozen_model_divides_its_layers_evenly() -> None:
    uneven = ParallelConfig(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=10)
    work = workload(parallel=uneven, frozen=(FrozenShape(replace(QWEN_7B, layers=4)),))
    assert (
        expected_memory(work, 2048).parameters > expected_memory(workload(parallel=uneven), 2048).parameters
    )


def test_a_critic_adds_its_state_and_the_larger_passes_count() -> None:
    alone, critic = workload(), replace(QWEN_7B, value_head=True)
    both = expected_memory(workload(critic=critic), 2048)
    policy, value = expected_memory(alone, 2048), expected_memory(workload(architecture=critic), 2048)
    table = QWEN_7B.vocabulary * QWEN_7B.hidden
    assert policy.parameters - value.parameters == 2 * (table - QWEN_7B.hidden - 1)
    for kind in ("parameters", "gradients", "optimizer"):
        assert getattr(both, kind) == getattr(policy, kind) + getattr(value, kind)
    assert (both.activations, both.head) == (policy.activations, policy.head)
    larger = replace(critic, layers=2 * QWEN_7B.layers)
    assert expected_memory(workload(critic=larger), 2048).activations > 1.5 * policy.activations
