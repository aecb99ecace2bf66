"""Loads a model beside the policy on a rank of its own."""

import torch

from trainer.backends.base import FrozenModel, FrozenSpec, Replicas
from trainer.config import ParallelConfig, TrainerConfig
from trainer.reference.backend import choose_device, load_frozen, require_one_rank


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
