"""Makes a training backend by name. A backend's module is imported when it is chosen."""

import pkgutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol.choices import checked_name
from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from trainer.algorithms.base import Algorithm
from trainer.backends.base import Backend, FrozenSpec
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.roles.config import CriticConfig
from trainer.roles.critic import Critic

BACKENDS = {
    "megatron": "trainer.megatron.backend:MegatronBackend",
    "reference": "trainer.reference.backend:ReferenceBackend",
    "scripted": "trainer.backends.scripted:ScriptedBackend",
}
"""Backend -> its class."""
CRITICS = {
    "megatron": "trainer.megatron.roles.critic:MegatronCritic",
    "reference": "trainer.reference.critic:ReferenceCritic",
}
"""Backend -> the class of its critic."""


def import_backend(name: str, *, with_critic: bool = False) -> None:
    """Import a backend, and its critic, before it is needed; an unknown name is ignored."""
    for table in (BACKENDS, CRITICS) if with_critic else (BACKENDS,):
        if name in table:
            pkgutil.resolve_name(table[name])


def make_backend(
    model_dir: Path,
    *,
    parallel: ParallelConfig,
    optimizer: OptimizerConfig,
    trainer: TrainerConfig,
    algorithm: Algorithm,
    adapters: LoraConfig = NO_ADAPTERS,
    shared: bool = False,
    frozen: Sequence[FrozenSpec] = (),
    critic_dir: Path | None = None,
) -> Backend:
    """Return this rank's part of the backend that `trainer.backend` names. Called on every rank.

    Args:
        model_dir: Hugging Face directory of the model to train.
        parallel: layout of the ranks.
        optimizer: settings of AdamW.
        trainer: settings of the backend.
        algorithm: advantages, loss and weights of a step.
        adapters: with a rank above 0, only these are trained.
        shared: whether the backend will compute with an engine's live weights.
        frozen: models that `Backend.load_frozen` will load, for which memory is planned.
        critic_dir: Hugging Face directory of the critic's model, for which memory is planned; None: there is
            no critic.

    Raises:
        SettingsError: no backend has that name, or it cannot work with these settings.
    """
    name = checked_name(trainer.backend, BACKENDS, "setting trainer.backend:")
    options: dict[str, Any] = {"trainer": trainer}
    if name != "scripted":  # that has no model
        options |= {
            "algorithm": algorithm,
            "model_dir": model_dir,
            "optimizer": optimizer,
            "adapters": adapters,
            "shared": shared,
        }
    if name == "megatron":
        options |= {"parallel": parallel, "frozen": frozen, "critic_dir": critic_dir}
    elif parallel.world_size != 1:
        raise SettingsError(
            f"the {name} backend runs on one rank, [parallel] asks for {parallel.world_size}: use megatron"
        )
    backend: Backend = pkgutil.resolve_name(BACKENDS[name])(**options)
    return backend


def make_critic(
    policy: Backend,
    model_dir: Path,
    *,
    optimizer: OptimizerConfig,
    trainer: TrainerConfig,
    config: CriticConfig,
) -> Critic:
    """Return this rank's part of the critic of a policy. Called on every rank.

    Args:
        policy: this rank's part of the policy, of the backend that `trainer.backend` names.
        model_dir: Hugging Face directory of the model that the critic starts from.
        optimizer: settings of the policy's AdamW; the critic's differ in the fields of `config`.
        trainer: settings of the backend.
        config: settings of the critic.

    Raises:
        SettingsError: the backend has no critic, or cannot train this one in the policy's layout.
    """
    name = checked_name(trainer.backend, CRITICS, "setting trainer.backend, with a critic:")
    critic: Critic = pkgutil.resolve_name(CRITICS[name])(
        policy, model_dir, optimizer=optimizer, trainer=trainer, config=config
    )
    return critic
