"""Defines section `[services]`, and places processes on GPUs, and models on ranks of the trainer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from protocol.errors import SettingsError
from protocol.paths import set_first
from reward.config import RewardConfig
from services.settings.engine_pool import PoolEntry, pool_size
from trainer.config import TrainerConfig
from trainer.registry import BACKENDS
from trainer.roles.config import FrozenConfig, PlacementConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class ServicesConfig:
    """Section `[services]`: how many processes `tether up` starts, on which GPUs."""

    rollouts: Annotated[int, Interval(ge=0, le=10_000)] = set_first(1)
    """Rollout workers on `[engine]`. With a pool, its counts are used instead."""
    pool: tuple[PoolEntry, ...] = ()
    """Rollout workers on different engines."""
    rewards: Annotated[int, Interval(ge=0, le=10_000)] = 1
    """Reward workers."""
    trainer_gpus: str = ""
    """GPUs of the trainer, as in CUDA_VISIBLE_DEVICES ("0,1"). Empty: those that `tether up` itself sees.
    auto: the first ones, if there are enough for engines too."""
    rollout_gpus: str = ""
    """GPUs of the rollout workers. Each gets the next `engine.tensor_parallel_size` of them; when they are
    used up, the next worker gets the first ones again. Empty: all see what `tether up` itself sees. auto:
    those that the trainer leaves."""
    eval_gpus: str = ""
    """GPUs of the evaluation's engine (`eval.every`). Empty: all that `tether up` itself sees."""
    reward_gpus: str = ""
    """GPUs of the reward workers, for reward models whose option `device` is a GPU. Empty: all that
    `tether up` itself sees."""
    restarts: Annotated[int, Interval(ge=0, le=10**6)] = 5
    """Restarts of one service within a minute, or in a row after one error; one death more ends the run (of
    evaluation, page and tracking: only them)."""
    spares: bool = True
    """Whether processes that have imported everything wait to replace a trainer, ingest, rollout or reward
    worker that dies; one for all workers with the same settings and GPUs."""

    @property
    def rollout_workers(self) -> int:
        """Rollout workers to start, of the pool or on `[engine]`."""
        return pool_size(self.pool) or self.rollouts


def rollout_variables(config: ServicesConfig, tensor_parallel_size: int, index: int) -> dict[str, str]:
    """Return the environment variables that limit rollout worker `index` to its own GPUs."""
    gpus = gpu_list(config.rollout_gpus)
    if not gpus:
        return {}
    first = index % max(1, len(gpus) // tensor_parallel_size) * tensor_parallel_size
    return {VISIBLE: ",".join(gpus[first : first + tensor_parallel_size])}


def gpu_variables(gpus: str) -> dict[str, str]:
    """Return the environment variables that limit a process to the GPUs of a list; none if it is empty."""
    return {VISIBLE: ",".join(gpu_list(gpus))} if gpu_list(gpus) else {}


def check_gpus(config: ServicesConfig, ranks: int, tensor_parallel_size: int, reward_ranks: int = 1) -> None:
    """Compare the lists of GPUs with how many GPUs one process of each kind needs.

    Args:
        config: section `[services]`.
        ranks: of the trainer on a host.
        tensor_parallel_size: GPUs of an engine.
        reward_ranks: GPUs of a reward worker.

    Raises:
        SettingsError: a list is too short, or names a GPU twice.
    """
    trainer, engine = (
        f"the trainer has {ranks} ranks",
        f"engine.tensor_parallel_size is {tensor_parallel_size}",
    )
    for name, text, count, reason in (
        ("trainer_gpus", config.trainer_gpus, ranks, trainer),
        ("rollout_gpus", config.rollout_gpus, tensor_parallel_size, engine),
        ("reward_gpus", config.reward_gpus, reward_ranks, f"a reward model is on {reward_ranks} GPUs"),
    ):
        gpus = gpu_list(text)
        if gpus and len(gpus) < count:
            raise SettingsError(f"setting services.{name}: {text!r} names {len(gpus)} GPUs, {reason}")
        if len(set(gpus)) < len(gpus):
            raise SettingsError(f"setting services.{name}: {text!r} names a GPU twice")


def reward_ranks(config: RewardConfig) -> int:
    """Return the GPUs of a reward worker: as many as its largest reward model is divided between."""
    options = [entry.options for entry in config.verifiers if entry.name == "reward_model"]
    sizes = [given.get("tensor_parallel_size", 1) for given in options]
    return max((size for size in sizes if isinstance(size, int)), default=1)  # others are refused elsewhere


def check_roles_apart(
    placement: PlacementConfig,
    trainer: TrainerConfig,
    frozen: Mapping[str, FrozenConfig],
    *,
    colocated: bool,
) -> None:
    """Check models that have ranks of their own.

    Args:
        placement: section `[placement]`.
        trainer: section `[trainer]`.
        frozen: role of a model that is not trained -> its section.
        colocated: whether trainer and engines take turns on their GPUs.

    Raises:
        SettingsError: names the setting, its value and what it can be.
    """
    for role, ranks in placement.ranks.items():
        named = f"setting placement.{role}: {ranks}"
        tensor, backend = getattr(placement, f"{role}_tensor_parallel_size"), trainer.backend
        if backend not in BACKENDS.having("frozen_apart"):
            raise SettingsError(f"{named}: trainer.backend {backend!r} has no models beside the policy")
        if backend == "reference" and ranks > 1:
            raise SettingsError(f"{named}: trainer.backend 'reference' has one rank for a model; set it to 1")
        if tensor > 1 and backend != "megatron":
            raise SettingsError(
                f"setting placement.{role}_tensor_parallel_size: {tensor}: trainer.backend {backend!r} has "
                "no tensor ranks; leave it out, or use megatron"
            )
        if ranks % tensor:
            raise SettingsError(
                f"{named}: placement.{role}_tensor_parallel_size {tensor} does not divide it; set a multiple"
            )
        if colocated:
            raise SettingsError(
                f"{named}: with colocated.enabled trainer and engines take turns on all of the trainer's "
                "GPUs, and a model with a GPU of its own takes no turns; leave one of the two out"
            )
        if role in frozen and frozen[role].offload:
            raise SettingsError(
                f"setting {role}.offload: the model has ranks of its own (placement.{role}), where nothing "
                "else needs the memory; leave it out"
            )


def gpu_list(text: str) -> list[str]:
    """Return the GPUs of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]
