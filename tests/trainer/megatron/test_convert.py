"""Tests the conversion rules: they invert, cover every row once, and refuse unknown names."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from protocol.errors import SettingsError
from protocol.weights.lora import LoraConfig
from tests.trainer.megatron.models import make_model, save_model
from trainer.config import ParallelConfig
from trainer.megatron.architecture.experts import NO_EXPERTS, ExpertNames, Experts, check_ranks
from trainer.megatron.architecture.families import FAMILIES
from trainer.megatron.architecture.latent import Latent
from trainer.megatron.architecture.numbers import Architecture
from trainer.megatron.architecture.reading import read_architecture
from trainer.megatron.architecture.rope import Rope
from trainer.megatron.convert.checkpoint import SafetensorsReader, check_names, check_parameters
from trainer.megatron.convert.families import EMBEDDING
from trainer.megatron.convert.rules import Direct, Rule
from trainer.megatron.layers.lora import lora_rules
from trainer.megatron.layout import Grid, Layout
from trainer.megatron.reshard import export_plan, stage_rules, stretch

TENSOR_SIZES = (1, 2, 4)
PIPELINE_SIZES = (1, 2)
EXPERT_SIZES = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2))
"""Ranks with different experts, and ranks that share each."""


def latents() -> st.SearchStrategy[Latent]:
    """Sizes of latent attention, with and without queries of low rank."""
    size = st.integers(1, 5)
    return st.builds(Latent, size, size, size, size, st.integers(0, 4))


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
        hidden=draw(st.integers(1, 9)),
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
            rows = stretch(source[s.name], rule.dim, s.start, s.length, s.source)
            stretch(local, rule.dim, s.local_start, s.length, s.of).copy_(rows)
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
            rows = stretch(parameter, plan.dim, piece.local_start, piece.length, piece.of)
            target = stretch(tensor, plan.dim, piece.start, piece.length, piece.source)
            assert (target == -1).all(), "covered twice"
            target.copy_(rows)
        assert torch.equal(tensor, source[plan.name]), plan.name


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


def test_a_fused_tensor_cannot_have_an_adapter(tmp_path: Path) -> None:
    rules = whole_rules(read_architecture(save_model("phi3", tmp_path)))
    for name in ("qkv_proj", "gate_up_proj"):
        with pytest.raises(SettingsError, match=f"{name}.weight cannot have an adapter"):
            lora_rules(rules, LoraConfig(rank=2, target_modules=(name,)))


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return save_model("qwen2-tied", tmp_path)


def change_tensors(model_dir: Path, **changes: torch.Tensor | None) -> None:
    path = model_dir / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def check(model_dir: Path) -> None:
    with SafetensorsReader(model_dir) as reader:
        check_names(reader, (found := read_architecture(model_dir)), layout_of(found))


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
    rules = whole_rules(architecture)
    parameters = {rule.parameter: torch.zeros(rule.local_shape(Grid())) for rule in rules}
    check_parameters(rules, parameters, Layout())
    with pytest.raises(SettingsError, match=r"more than one rule maps decoder\.final_layernorm\.weight"):
        check_parameters([*rules, rules[-1]], parameters, 1)
    with pytest.raises(SettingsError, match=r"differ in decoder\.extra"):
        check_parameters(rules, {**parameters, "decoder.extra": torch.zeros(1)}, Layout())
    with pytest.raises(SettingsError, match="its rule says"):
        check_parameters(rules, {**parameters, rules[-1].parameter: torch.zeros(1)}, Layout())
