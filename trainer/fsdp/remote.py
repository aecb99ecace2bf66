"""Loads models other than the policy on ranks of their own, sharded over these ranks."""

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer.backends.base import FrozenModel, FrozenSpec, Replicas
from trainer.config import ParallelConfig, TrainerConfig
from trainer.fsdp.backend import join_mesh
from trainer.fsdp.critic import FsdpCritic
from trainer.fsdp.layout import check_layout
from trainer.fsdp.memory.expected import ShardedWorkload, read_size
from trainer.fsdp.model import load_frozen
from trainer.memory.plan import MemoryPlan
from trainer.reference.frozen import architecture_of, frozen
from trainer.roles.critic import Critic, CriticSpec
from trainer.roles.row_scores import token_evaluator


def load_remote_frozen(
    spec: FrozenSpec, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[FrozenModel, Replicas]:
    """Load a frozen model; as `trainer.registry.make_remote_frozen`. A collective.

    Raises:
        SettingsError: transformers cannot load the model, or the backend does not support the layout.
    """
    mesh = _joined(parallel, trainer)
    model = load_frozen(spec, mesh, trainer)
    return frozen(model.module, token_evaluator(spec, model.evaluate)), _replicas(mesh)


def load_remote_critic(
    spec: CriticSpec, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[Critic, Replicas]:
    """Load a critic; as `trainer.registry.make_remote_critic`. A collective.

    Raises:
        SettingsError: transformers cannot load the critic, the devices have too little memory, or the backend
            does not support the layout.
    """
    mesh = _joined(parallel, trainer)
    work = ShardedWorkload(
        model=read_size(spec.directory, parallel.tensor_model_parallel_size),
        parallel=parallel,
        trainer=trainer,
        optimizer=spec.config.optimizer(spec.optimizer),
    )
    tokens = MemoryPlan(work, torch.device(mesh.device_type)).tokens
    critic = FsdpCritic(
        mesh,
        architecture_of(spec.policy_dir),
        spec.directory,
        optimizer=spec.optimizer,
        trainer=replace(trainer, micro_batch_tokens=tokens),
        config=spec.config,
    )
    return critic, _replicas(mesh)


def _joined(parallel: ParallelConfig, trainer: TrainerConfig) -> DeviceMesh:
    """Join the process group of the model's ranks, and return their mesh. A collective."""
    check_layout(parallel, trainer)
    torch.set_num_threads(trainer.threads)
    return join_mesh(parallel, trainer)[0]


def _replicas(mesh: DeviceMesh) -> Replicas:
    """Return the ranks of each replica of a sharded model."""
    return tuple(map(tuple, mesh.mesh.tolist()))
