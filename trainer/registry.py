"""Creates training backends by name. A backend's module is imported when the backend is selected."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.choices import Entry, Registry, checked_name, load
from protocol.errors import SettingsError
from protocol.weights.lora import NO_ADAPTERS, LoraConfig
from trainer.algorithms.base import Algorithm
from trainer.backends.base import Backend, FrozenModel, FrozenSpec, Replicas
from trainer.config import OptimizerConfig, ParallelConfig, TrainerConfig
from trainer.roles.config import CriticConfig
from trainer.roles.critic import Critic, CriticSpec
from trainer.roles.drafts import DraftTraining


@dataclass(frozen=True, slots=True)
class BackendEntry(Entry):
    """A training backend: its class, its critic, and its loaders of models on separate ranks."""

    critic: str = ""
    """`MODULE:NAME` of the critic's class, whose `beside` creates a critic; empty: no critic."""
    remote_frozen: str = ""
    """`MODULE:NAME` of the function that `make_remote_frozen` calls; empty: no frozen models."""
    remote_critic: str = ""
    """`MODULE:NAME` of the function that `make_remote_critic` calls; empty: no critic."""
    drafts: bool = False
    """Whether the backend provides the hidden states for training a draft head."""


BACKENDS = Registry(
    {
        "fsdp": BackendEntry(
            "trainer.fsdp.backend:FsdpBackend",
            "trainer.fsdp.critic:FsdpCritic",
            "trainer.fsdp.remote:load_remote_frozen",
            "trainer.fsdp.remote:load_remote_critic",
            drafts=True,
        ),
        "megatron": BackendEntry(
            "trainer.megatron.backend:MegatronBackend",
            "trainer.megatron.roles.critic:MegatronCritic",
            "trainer.megatron.backend:load_remote_frozen",
            "trainer.megatron.roles.critic:load_remote_critic",
        ),
        "reference": BackendEntry(
            "trainer.reference.backend:ReferenceBackend",
            "trainer.reference.critic:ReferenceCritic",
            "trainer.reference.backend:load_remote_frozen",
            "trainer.reference.critic:load_remote_critic",
            drafts=True,
        ),
        "scripted": BackendEntry("trainer.backends.scripted:ScriptedBackend"),
    }
)


def import_backend(name: str, *, with_critic: bool = False) -> None:
    """Import a backend, and optionally its critic, in advance; ignore an unknown name."""
    entry = BACKENDS.get(name, BackendEntry(""))
    for path in (entry.path, entry.critic) if with_critic else (entry.path,):
        if path:
            load(path)


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
    served: int = 0,
) -> Backend:
    """Return this rank's shard of the backend `trainer.backend`. Called on every rank.

    Args:
        model_dir: Hugging Face directory of the model to train.
        algorithm: advantages, loss and weights of a step.
        adapters: with a rank above 0, only adapters are trained.
        shared: whether the backend will compute with an engine's live weights.
        frozen: models that `Backend.load_frozen` will load; the memory plan includes them.
        critic_dir: Hugging Face directory of the critic's model, included in the memory plan; None: no
            critic.
        served: bytes on this rank's device for versions that engines read, and for a draft head.

    Raises:
        SettingsError: the backend is unknown, or does not support these settings.
    """
    name, entry = trainer.backend, BACKENDS.find(trainer.backend, "setting trainer.backend:")
    options: dict[str, Any] = {"trainer": trainer}
    if name != "scripted":  # the scripted backend has no model
        options |= {
            "algorithm": algorithm,
            "model_dir": model_dir,
            "optimizer": optimizer,
            "adapters": adapters,
            "shared": shared,
        }
    if name in ("megatron", "fsdp"):
        options |= {"parallel": parallel, "frozen": frozen, "critic_dir": critic_dir, "served": served}
    elif parallel.world_size != 1:
        raise SettingsError(
            f"the {name} backend runs on one rank, [parallel] asks for {parallel.world_size}: use megatron"
        )
    backend: Backend = load(entry.path)(**options)
    return backend


def make_critic(
    policy: Backend,
    model_dir: Path,
    *,
    optimizer: OptimizerConfig,
    trainer: TrainerConfig,
    config: CriticConfig,
) -> Critic:
    """Return this rank's shard of the critic of a policy. Called on every rank.

    Args:
        policy: this rank's shard of the policy, of the backend `trainer.backend`.
        model_dir: Hugging Face directory of the critic's initial model.
        optimizer: settings of the policy's AdamW, which the critic uses except for the fields of `config`.

    Raises:
        SettingsError: the backend has no critic, or cannot train this critic in the policy's layout.
    """
    with_critic = BACKENDS.having("critic")
    name = checked_name(trainer.backend, with_critic, "setting trainer.backend, with a critic:")
    critic: Critic = load(BACKENDS[name].critic).on_policy_ranks(
        policy, model_dir, optimizer=optimizer, trainer=trainer, config=config
    )
    return critic


def make_draft_training(policy: Backend, directory: Path, lr: float) -> DraftTraining:
    """Return the training of a draft head, which the policy then publishes with its versions.

    Args:
        policy: policy on one rank, of a backend with `drafts`.
    """
    drafts: DraftTraining = load("trainer.reference.eagle:EagleTraining")(directory, lr, policy)
    policy.extra_tensors = drafts.published
    return drafts


def make_remote_frozen(
    spec: FrozenSpec, *, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[FrozenModel, Replicas]:
    """Return this rank's shard of a frozen model with ranks of its own. Called on each of these ranks.

    Args:
        spec: the model.
        parallel: layout of the model's ranks, which have joined their process group.

    Returns:
        The shard, and the ranks of each replica of the model.

    Raises:
        SettingsError: the backend does not support frozen models, or this model in this layout.
    """
    placing = BACKENDS.having("remote_frozen")
    name = checked_name(trainer.backend, placing, f"setting trainer.backend, with placement.{spec.role}:")
    made: tuple[FrozenModel, Replicas] = load(BACKENDS[name].remote_frozen)(spec, parallel, trainer)
    return made


def make_remote_critic(
    spec: CriticSpec, *, parallel: ParallelConfig, trainer: TrainerConfig
) -> tuple[Critic, Replicas]:
    """Return this rank's shard of a critic with ranks of its own. Called on each of these ranks.

    Args:
        spec: the model, and its training settings.
        parallel: layout of the critic's ranks, which have joined their process group.

    Returns:
        The shard, and the ranks of each replica of the critic.

    Raises:
        SettingsError: the backend has no critic, or cannot train this critic in this layout.
    """
    placing = BACKENDS.having("remote_critic")
    name = checked_name(trainer.backend, placing, "setting trainer.backend, with placement.critic:")
    made: tuple[Critic, Replicas] = load(BACKENDS[name].remote_critic)(spec, parallel, trainer)
    return made
