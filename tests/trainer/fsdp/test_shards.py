"""Tests that tensor-parallel ranks load and publish their parts of experts whose matrices are one tensor."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from protocol.device.checkpoint_views import model_tensors
from tests.trainer.fsdp.tiny_models import save_tiny
from trainer.config import TrainerConfig
from trainer.fsdp.loading import _read
from trainer.fsdp.sharding import divide, shard
from trainer.fsdp.shards import ShardPlan, shard_rows, tensor_views
from trainer.reference.frozen import load_model
from trainer.reference.shards import DATA, TENSOR, local_tensor, tensor_cut, tensor_parallel_part

FUSED = "model.layers.0.experts.gate_up_proj"
FIELDS = {
    "enable_moe_block": True,
    "top_k_experts": 2,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
}


@pytest.mark.parametrize("rank", range(4))
def test_gates_and_inputs_of_experts_in_one_tensor_are_divided_apart(rank: int, tmp_path: Path) -> None:
    model_dir = save_tiny("gemma4_text", tmp_path, **FIELDS)
    files = load_file(model_dir / "model.safetensors")
    dist.init_process_group("fake", rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(DATA, TENSOR))
        model = load_model(model_dir, "model.path", blank=True)
        divide(model, mesh)
        shard(model, model, mesh, TrainerConfig(dtype="float32", device="cpu"))
        blank = model_tensors(model)
        assert tensor_cut(blank[FUSED]) == (1, 2)
        found = _read(model, model_dir, mesh)
        assert found is not None
        plan = ShardPlan.make(tensor_views(model, blank, mesh), found, mesh)
        assert plan is not None
        for name, tensor in found.items():
            part = files[name]
            if isinstance(tensor, DTensor):
                part = tensor_parallel_part(part, tensor_cut(tensor), rank % 2, 2)
                part = part[slice(*shard_rows(len(part), rank // 2, 2))]
            assert torch.equal(local_tensor(tensor), part), name
        pieces = list(plan.published(rank))
        cuts = plan.cut(found, rank // 2, (own for _, own in pieces))
        for (piece, _), (name, tensor) in zip(pieces, cuts, strict=True):
            box = tuple(slice(*edges) for edges in piece.box)
            assert torch.equal(tensor, files[name][box]), name
    finally:
        dist.destroy_process_group()
