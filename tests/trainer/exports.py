"""Exports a model by its ranks."""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from trainer.backends.base import Backend
from trainer.storage.hf_export import Shards, finish_hf, shards_of
from trainer.storage.host_state import HostCopies


def export_by_rank(backend: Backend, directory: Path, model_dir: Path) -> None:
    """Each rank writes the tensors that it has; of several none has all."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    rank = 0 if alone else dist.get_rank()
    own = HostCopies().copy_all(backend.export_model())
    if not alone:
        counts = torch.tensor([len(own), -len(own)])
        dist.all_reduce(counts, dist.ReduceOp.MAX)
        assert max(counts.tolist()) < len(backend.publication.names) or backend.targets
        assert counts[1] < 0
    Shards(own, rank).write(shards_of(directory))
    if not alone:
        dist.barrier()
    if rank == 0:
        finish_hf(directory, model_dir)


def read_export(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors in the files of an export, each of which is in one of them."""
    found: dict[str, torch.Tensor] = {}
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        assert found.keys().isdisjoint(tensors)
        found |= tensors
    return found
