"""Tests the conversion rules: they invert, cover every row once, and refuse unknown names."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import SettingsError
from protocol.weights.lora import LoraConfig
from tests.changes import slow_unless_changed
from tests.trainer.megatron.models import save_model
from trainer.config import ParallelConfig
from trainer.megatron.convert.adapters import lora_rules
from trainer.megatron.convert.reshard import narrow_rows
from trainer.megatron.convert.rules import Direct, Rule
from trainer.megatron.families.delta import DeltaNet
from trainer.megatron.families.experts import NO_EXPERTS, ExpertNames, Experts, check_ranks
from trainer.megatron.families.latent import Latent
from trainer.megatron.families.numbers import Architecture
from trainer.megatron.families.reading import read_architecture
from trainer.megatron.families.rope import Rope
from trainer.megatron.families.stages import export_plan, stage_rules
from trainer.megatron.families.table import FAMILIES
from trainer.megatron.layout import Layout

TENSOR_SIZES = (1, 2, 4)
PIPELINE_SIZES = (1, 2)
EXPERT_SIZES = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2))
"""Ranks with different experts, and ranks that share each."""


def latents() -> st.SearchStrategy[Latent]:
    """Sizes of latent attention, with and without queries of low rank."""
    size = st.integers(1, 5)
    return st.builds(Latent, size, size, size, size, st.integers(0, 4))


CHANGED = slow_unless_changed("trainer/megatron/", "tests/trainer/megatron/")


@st.composite
def delta_nets(draw: st.DrawFn) -> DeltaNet:
    """Gated delta nets that split over up to 4 tensor ranks, in some layers."""
    heads, size = 4 * draw(st.integers(1, 2)), st.integers(1, 3)
    layers = draw(st.sampled_from([(0,), (1,), (0, 1)]))
    return DeltaNet(layers, heads, heads * draw(size), key=draw(size), value=draw(size), kernel=draw(size))


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Small models of every family that split over up to 4 tensor and 2 pipeline ranks; also fewer kv heads
    than tensor ranks."""
    model_type = draw(st.sampled_from(sorted(FAMILIES)))
    kv_heads = 4 if FAMILIES[model_type].qk_norm == "projection" else draw(st.sampled_from([1, 2, 4]))
    switches = [names for names in FAMILIES[model_type].biases.values() if draw(st.booleans())]
    heads = max(4, kv_heads * draw(st.integers(1, 3)) // 4 * 4)
    return Architecture(
        model_type=model_type,
        name="Any",
        layers=draw(st.sampled_from([2, 4])),
        hidden=draw(st.integers(1, 9)) * (2 if FAMILIES[model_type].experts else 1),
        intermediate=4 * draw(st.integers(1, 4)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=4 * draw(st.integers(1, 2)),
        vocabulary=draw(st.integers(1, 40)),
        tied=draw(st.booleans()),
        norm_eps=1e-6,
        max_positions=64,
        rope=Rope(10000.0),
        latent=draw(latents()) if FAMILIES[model_type].latent else None,
        delta=draw(delta_nets()) if FAMILIES[model_type].delta else None,
        biases=tuple(name for names in switches for name in names),
        experts=draw(experts(FAMILIES[model_type].experts)),
    )


@st.composite
def experts(draw: st.DrawFn, names: ExpertNames | None) -> Experts:
    """Experts that split over up to 4 ranks, 2 of which may share each; in some layers, or in none."""
    if names is None:
        return NO_EXPERTS
    return Experts(
        count=4 * draw(st.integers(1, 2)),
        per_token=2,
        intermediate=4 * draw(st.integers(1, 2)),
        shared_intermediate=4 if names.shared else 0,
        shared_gate=bool(names.shared_gate),
        dense_layers=draw(st.sampled_from([(), (0,), (1,), (0, 1)])),
        **names.defaults,
    )


def numbered(architecture: Architecture) -> dict[str, torch.Tensor]:
    """Tensors of which no two elements are equal."""
    result, count = {}, 1
    for plan in export_plan(architecture, layout_of(architecture)):
        size = torch.Size(plan.shape).numel()
        result[plan.name] = torch.arange(count, count + size, dtype=torch.float64).view(plan.shape)
        count += size
    return result


def layout_of(architecture: Architecture, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1) -> Layout:
    sizes = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        data_parallel_size=ep * etp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    return Layout.of(sizes, architecture.layers)


def fill(rule: Rule, source: dict[str, torch.Tensor], layout: Layout, rank: int) -> torch.Tensor:
    grid = layout.grid(expert=rule.expert)
    local = torch.zeros(rule.local_shape(grid), dtype=torch.float64)
    for s in rule.segments(grid):
        if s.rank == rank:
            rows = narrow_rows(source[s.name], rule.dim, s.start, s.length, s.matrix)
            narrow_rows(local, rule.dim, s.local_start, s.length, s.local_matrix).copy_(rows)
    return local


def whole_rules(architecture: Architecture) -> list[Rule]:
    return stage_rules(architecture, layout_of(architecture), 0)


def ranks_of(layout: Layout, rule: Rule) -> range:
    grid = layout.grid(expert=rule.expert)
    return range(grid.tp * grid.ep)


@given(
    architectures(),
    st.sampled_from(TENSOR_SIZES),
    st.sampled_from(PIPELINE_SIZES),
    st.sampled_from(EXPERT_SIZES),
)
def test_loaded_checkpoint_is_exported(
    architecture: Architecture, tp: int, pp: int, sizes: tuple[int, int]
) -> None:
    source, layout = numbered(architecture), layout_of(architecture, tp, pp, *sizes)
    held = {
        (stage, rank, rule.parameter): fill(rule, source, layout, rank)
        for stage in range(pp)
        for rule in stage_rules(architecture, layout, stage)
        for rank in ranks_of(layout, rule)
    }
    for plan in export_plan(architecture, layout):
        tensor = torch.full(plan.shape, -1.0, dtype=torch.float64)
        for piece in plan.pieces:
            parameter = held[plan.stage, piece.rank, plan.parameter]
            rows = narrow_rows(parameter, plan.dim, piece.local_start, piece.length, piece.local_matrix)
            target = narrow_rows(tensor, plan.dim, piece.start, piece.length, piece.matrix)
            assert (target == -1).all(), "covered twice"
            target.copy_(rows)
        assert torch.equal(tensor, source[plan.name]), plan.name


@CHANGED
@given(
    architectures(),
    st.sampled_from(TENSOR_SIZES),
    st.sampled_from(PIPELINE_SIZES),
    st.sampled_from(EXPERT_SIZES),
)
def test_every_row_of_a_parameter_has_one_source_or_is_padding(
    architecture: Architecture, tp: int, pp: int, sizes: tuple[int, int]
) -> None:
    source, layout = numbered(architecture), layout_of(architecture, tp, pp, *sizes)
    for stage in range(pp):
        for rule in stage_rules(architecture, layout, stage):
            parts = [fill(rule, source, layout, rank) for rank in ranks_of(layout, rule)]
            if isinstance(rule, Direct):
                assert all(torch.equal(part, parts[0]) for part in parts)
                parts = parts[:1]
            elements = torch.cat([part.flatten() for part in parts])
            wanted = torch.cat([source[name].flatten() for name in rule.shapes])
            kept = elements[elements != 0]
            assert torch.equal(kept.sort().values, wanted.sort().values)
            assert len(elements) - len(kept) < tp * architecture.hidden


@CHANGED
@given(architectures())
def test_the_order_of_the_export_does_not_depend_on_the_layout(architecture: Architecture) -> None:
    orders = {
        tuple(plan.name for plan in export_plan(architecture, layout_of(architecture, tp, pp)))
        for tp in TENSOR_SIZES
        for pp in PIPELINE_SIZES
    }
    assert len(orders) == 1


def test_a_layout_that_does_not_divide_is_refused_with_what_to_change(tmp_path: Path) -> None:
    architecture = read_architecture(save_model("qwen2", tmp_path))
    with pytest.raises(
        SettingsError, match="pipeline_model_parallel_size = 3 does not divide the model's 2 layers"
    ):
        layout_of(architecture, pp=3)
    with pytest.raises(SettingsError, match="tensor_model_parallel_size = 5 does not divide"):
        export_plan(architecture, layout_of(architecture, tp=5))


def test_experts_that_cannot_be_divided_are_refused_with_what_to_change(tmp_path: Path) -> None:
    architecture = read_architecture(save_model("mixtral", tmp_path))
    with pytest.raises(SettingsError, match=r"expert_model_parallel_size = 3 does not divide the 4 experts"):
        export_plan(architecture, layout_of(architecture, ep=3))
    with pytest.raises(SettingsError, match=r"expert_tensor_parallel_size = 5 does not divide the 96 rows"):
        export_plan(architecture, layout_of(architecture, etp=5))
    sizes = ParallelConfig(data_parallel_size=3, expert_model_parallel_size=2)
    with pytest.raises(SettingsError, match=r"= 2 times .* = 1 does not divide the 3 ranks"):
        Layout.of(sizes, architecture.layers)


def test_ranks_that_cannot_have_experts_are_refused() -> None:
    sizes = ParallelConfig(data_parallel_size=2, expert_model_parallel_size=2)
    with pytest.raises(SettingsError, match=r"expert_model_parallel_size: 2, but the model has no experts"):
        check_ranks(NO_EXPERTS, sizes)
    check_ranks(Experts(count=4), sizes)
    with pytest.raises(SettingsError, match=r"sequence_parallel: false, .* on 2 tensor ranks needs it"):
        check_ranks(Experts(count=4), ParallelConfig(tensor_model_parallel_size=2))


def test_an_expert_cannot_have_an_adapter(tmp_path: Path) -> None:
    rules = whole_rules(read_architecture(save_model("qwen3-moe", tmp_path)))
    assert len(lora_rules(rules, LoraConfig(rank=2, target_modules=("q_proj", "o_proj")))) == 4 * 4
    with pytest.raises(SettingsError, match=r"experts\.0\.up_proj\.weight is an expert's, .* attention only"):
        lora_rules(rules, LoraConfig(rank=2, target_modules=("up_proj",)))


def test_a_norm_over_all_heads_needs_whole_heads_on_each_rank(tmp_path: Path) -> None:
    architecture = read_architecture(save_model("olmo2", tmp_path))
    with pytest.raises(SettingsError, match=r"= 4 does not divide the 2 heads of .*k_norm"):
        export_plan(architecture, layout_of(architecture, tp=4))


def test_layouts_and_adapters_that_a_gated_delta_net_cannot_have_are_refused(tmp_path: Path) -> None:
    architecture = read_architecture(save_model("qwen3-next", tmp_path))
    sizes = ParallelConfig(context_parallel_size=2)
    with pytest.raises(SettingsError, match=r"context_parallel_size = 2 is not supported in qwen3_next"):
        export_plan(architecture, Layout.of(sizes, architecture.layers))
    with pytest.raises(SettingsError, match=r"= 4 does not divide the 2 heads of .*in_proj"):
        export_plan(architecture, layout_of(architecture, tp=4))
    with pytest.raises(SettingsError, match=r"in_proj_qkvz\.weight cannot have an adapter"):
        lora_rules(whole_rules(architecture), LoraConfig(rank=2, target_modules=("in_proj_qkvz",)))


def test_a_fused_tensor_cannot_have_an_adapter(tmp_path: Path) -> None:
    rules = whole_rules(read_architecture(save_model("phi3", tmp_path)))
    for name in ("qkv_proj", "gate_up_proj"):
        with pytest.raises(SettingsError, match=f"{name}.weight cannot have an adapter"):
            lora_rules(rules, LoraConfig(rank=2, target_modules=(name,)))


def test_numbers_and_rules_of_families_are_read_without_torch() -> None:
    code = "import sys, trainer.megatron.families.stages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
