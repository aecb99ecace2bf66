"""Loads a model beside the policy on ranks of its own, sharded over them."""

import torch

from trainer.backends.base import FrozenModel, FrozenSpec, Replicas
from trainer.config import ParallelConfig, TrainerConfig
from trainer.fsdp.backend import join_mesh
from trainer.fsdp.layout import check_layout
from trainer.fsdp.model import ShardedModel
from trainer.reference.frozen import FrozenTransformer, load_model


def load_frozen_apart(
    spec: FrozenSpec, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[FrozenModel, Replicas]:
    """Load a model that is never trained; as `trainer.registry.make_frozen`. A collective.

    Raises:
        SettingsError: transformers cannot load it, or a layout other than data-parallel ranks.
    """
    check_layout(parallel)
    torch.set_num_threads(trainer.threads)
    mesh, _ = join_mesh(parallel, trainer)
    model = ShardedModel(load_model(spec.directory, f"{spec.role}.path"), mesh, trainer, trained=False)
    frozen = FrozenTransformer(model.module, lambda _, batch: model.evaluate(batch))
    return frozen, tuple((rank,) for rank in range(mesh.size()))
