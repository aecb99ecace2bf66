"""Tests that layouts which a model does not have are refused by name."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from protocol.errors import SettingsError
from tests.trainer.fsdp.tiny_models import save_tiny
from tests.trainer.megatron.models import save_model
from trainer.backends.base import FrozenSpec
from trainer.config import ParallelConfig, TrainerConfig
from trainer.fsdp import layout
from trainer.fsdp.layout import adapter_refusal, check_layout, division_refusal, plan_of, style_of
from trainer.fsdp.loading import load_shards
from trainer.fsdp.remote import load_remote_frozen
from trainer.fsdp.sharding import divide
from trainer.reference.frozen import load_model
from trainer.reference.shards import DATA, TENSOR, joined, tensor_parallel_part

TWO = ParallelConfig(tensor_model_parallel_size=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pipeline_model_parallel_size", 3),
        ("expert_model_parallel_size", 2),
        ("sequence_parallel", True),
    ],
)
def test_other_ranks_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(SettingsError, match=rf"parallel.{field}: {value}: .* use megatron"):
        check_layout(ParallelConfig(**{field: value}), TrainerConfig())  # type: ignore[arg-type]


def test_sharded_ranks_pass() -> None:
    check_layout(ParallelConfig(data_parallel_size=8, use_distributed_optimizer=False), TrainerConfig())
    check_layout(ParallelConfig(data_parallel_size=4, tensor_model_parallel_size=2), TrainerConfig())


def test_compiled_layers_and_fp8_on_tensor_parallel_ranks_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"size: 2: .* are not in FP8 \(trainer\.fp8\); remove one of"):
        check_layout(TWO, TrainerConfig(fp8="rowwise"))
    with pytest.raises(SettingsError, match=r"tensor_model_parallel_size: 2: .* are not compiled"):
        check_layout(TWO, TrainerConfig(compile=True))
    spec = FrozenSpec(role="reference", directory=Path("absent"))
    with pytest.raises(SettingsError, match=r"tensor_model_parallel_size: 2: .* are not compiled"):
        load_remote_frozen(spec, TWO, TrainerConfig(compile=True))


def test_tensor_parallel_ranks_are_refused_where_transformers_cannot_divide_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout, "TP_MODULE", "transformers.distributed.absent")
    with pytest.raises(SettingsError, match=r"size: 2: .* by .*absent, which transformers 5\S+ lacks"):
        check_layout(TWO, TrainerConfig())
    check_layout(ParallelConfig(data_parallel_size=2), TrainerConfig())


def test_adapters_on_latent_attentions_first_layer_are_refused_by_its_name() -> None:
    plan, layer = plan_of({"model_type": "deepseek_v2"}), "model.layers.3.self_attn."
    others = [f"{layer}kv_b_proj", f"{layer}o_proj", "model.layers.3.mlp.up_proj"]
    assert adapter_refusal(plan, others, 2) == ""
    first = f"{layer}kv_a_proj_with_mqa"
    assert adapter_refusal(plan, [*others, first], 2).endswith(f"have no adapter on {first}")
    assert adapter_refusal(plan, [first], 1) == ""


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two tensor-parallel ranks, of which the other one is not there."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (1, 2), mesh_dim_names=(DATA, TENSOR))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        ("gpt-oss", "transformers has no tensor-parallel plan for model_type 'gpt_oss'"),
        ("qwen2-tied", "it does not divide the model's num_key_value_heads 1"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_by_name(
    model: str, cause: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    blank = load_model(save_model(model, tmp_path), "model.path", blank=True)
    with pytest.raises(SettingsError, match=f"tensor_model_parallel_size: 2: {cause}"):
        divide(blank, mesh)
    config = blank.config.to_dict()
    assert division_refusal(plan_of(config), config, 2) == cause
    assert division_refusal({}, config, 1) == ""


def test_a_matrix_that_cannot_be_divided_is_refused_by_name(mesh: DeviceMesh, tmp_path: Path) -> None:
    model_dir = save_tiny("qwen2", tmp_path, intermediate_size=95)
    blank = load_model(model_dir, "model.path", blank=True)
    with pytest.raises(
        SettingsError, match=r"does not divide model.layers.0.mlp.\w+.weight \(95, 64\) along"
    ):
        divide(blank, mesh)


@pytest.mark.parametrize("error", [RuntimeError, IndexError, TypeError, ValueError, torch.OutOfMemoryError])
def test_a_pass_that_the_plan_breaks_is_refused_and_want_of_memory_is_not(
    error: type[Exception], mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise error("here")

    model_dir = save_tiny("qwen2", tmp_path)
    monkeypatch.setattr(Qwen2MLP, "forward", fails)
    expected = error if error is torch.OutOfMemoryError else SettingsError
    with pytest.raises(expected, match="here"):
        load_shards(model_dir, "model.path", mesh, TrainerConfig(device="cpu"))


def test_a_plan_says_which_tensors_of_a_checkpoint_are_divided() -> None:
    plan = plan_of({"model_type": "qwen3_moe"})
    found = {
        name: style_of(f"model.layers.3.{name}", plan)
        for name in ("self_attn.q_proj.weight", "self_attn.o_proj.weight", "self_attn.q_norm.weight",
                     "mlp.experts.11.up_proj.weight", "mlp.experts.11.down_proj.weight", "mlp.gate.weight")
    }  # fmt: skip
    assert list(found.values()) == ["colwise", "rowwise", "", "colwise", "rowwise", ""]
    tables = {"embed_tokens": "embedding_rowwise", "embed_in": "embedding_rowwise", "lm_head": "colwise"}
    for name in ("model.embed_tokens.weight", "model.embed_in.weight", "lm_head.weight"):
        assert style_of(name, plan | tables) == ""


@pytest.mark.parametrize("cut", [None, (0, 1), (1, 1), (1, 2), (2, 3)])
def test_parts_join_to_the_whole(cut: tuple[int, int] | None) -> None:
    whole = torch.arange(4 * 8 * 12).view(4, 8, 12)
    parts = [tensor_parallel_part(whole, cut, rank, 2) for rank in range(2)]
    assert torch.equal(joined(parts, cut), whole)
    if cut == (1, 2):  # gates, then inputs
        assert torch.equal(parts[1], torch.cat([whole[:, 2:4], whole[:, 6:8]], 1))
