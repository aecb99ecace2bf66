"""Loads models beside the policy on ranks of their own, in a layout of their own."""

import torch

from trainer.backends.base import FrozenModel, FrozenSpec, Replicas
from trainer.batch import Batch
from trainer.config import ParallelConfig, TrainerConfig
from trainer.megatron.backend import initialize
from trainer.megatron.families.reading import read_critic
from trainer.megatron.forward import Runner
from trainer.megatron.memory.expected import Workload
from trainer.megatron.optimizer_step import retry_of
from trainer.megatron.roles.critic import MegatronCritic
from trainer.megatron.roles.frozen import FrozenPart
from trainer.memory.expected import TOKENS_ON_CPU
from trainer.memory.plan import MemoryPlan
from trainer.roles.critic import Critic, CriticSpec

TOKENS_ON_GPU = 16384
"""Tokens of a pass on a GPU, at first, where `trainer.micro_batch_tokens` is 0."""


def load_frozen_apart(
    spec: FrozenSpec, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[FrozenModel, Replicas]:
    """Load a model that is never trained; as `trainer.registry.make_frozen`. A collective.

    Raises:
        SettingsError: the model is not supported, or does not fit the layout; names the setting.
    """
    position = initialize(parallel, trainer)
    least = TOKENS_ON_GPU if position.device.type == "cuda" else TOKENS_ON_CPU
    passes = retry_of(position, trainer.micro_batch_tokens or least, lambda: None)

    def evaluate(runner: Runner, batch: Batch) -> torch.Tensor:
        return passes.alone(runner, batch, lambda: runner.logprobs(batch))

    return FrozenPart(spec, position, trainer, evaluate), position.replicas()


def load_critic_apart(
    spec: CriticSpec, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[Critic, Replicas]:
    """Load a critic; as `trainer.registry.make_critic_apart`. A collective.

    Raises:
        SettingsError: the model is not supported, or does not fit the layout or its devices.
    """
    position = initialize(parallel, trainer)
    architecture, optimizer = read_critic(spec.directory), spec.config.optimizer(spec.optimizer)
    work = Workload(architecture=architecture, parallel=parallel, trainer=trainer, optimizer=optimizer)
    critic = MegatronCritic(
        parallel,
        MemoryPlan(work, position.device).tokens,
        spec.directory,
        optimizer=spec.optimizer,
        trainer=trainer,
        config=spec.config,
    )
    return critic, position.replicas()
