"""Loads models beside the policy on a rank of their own."""

import torch

from trainer.backends.base import FrozenModel, FrozenSpec, Replicas
from trainer.config import ParallelConfig, TrainerConfig
from trainer.reference.backend import choose_device, load_frozen, require_one_rank
from trainer.reference.critic import ReferenceCritic
from trainer.reference.frozen import architecture_of
from trainer.roles.critic import Critic, CriticSpec


def load_frozen_apart(
    spec: FrozenSpec, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[FrozenModel, Replicas]:
    """Load a model that is never trained; as `trainer.registry.make_frozen`.

    Raises:
        SettingsError: transformers cannot load it, or it has several ranks.
    """
    require_one_rank()
    torch.set_num_threads(trainer.threads)
    return load_frozen(spec, trainer, choose_device(trainer.device)), ((0,),)


def load_critic_apart(
    spec: CriticSpec, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[Critic, Replicas]:
    """Load a critic; as `trainer.registry.make_critic_apart`.

    Raises:
        SettingsError: transformers cannot load it, or it has several ranks.
    """
    require_one_rank()
    torch.set_num_threads(trainer.threads)
    critic = ReferenceCritic(
        choose_device(trainer.device),
        architecture_of(spec.policy_dir),
        spec.directory,
        optimizer=spec.optimizer,
        trainer=trainer,
        config=spec.config,
    )
    return critic, ((0,),)
