"""Defines section `[services]`, and assigns processes to GPUs and models to trainer ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from protocol.errors import SettingsError
from protocol.paths import basic_setting
from reward.config import RewardConfig
from services.settings.engine_pool import PoolEntry, pool_size
from trainer.config import TrainerConfig
from trainer.registry import BACKENDS
from trainer.roles.config import FrozenConfig, PlacementConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class ServicesConfig:
    """Section `[services]`: processes that `tether up` starts, and their GPUs."""

    rollouts: Annotated[int, Interval(ge=0, le=10_000)] = basic_setting(1)
    """Number of rollout workers on `[engine]`. Ignored if `pool` is set."""
    pool: tuple[PoolEntry, ...] = ()
    """Rollout workers on different engines."""
    rewards: Annotated[int, Interval(ge=0, le=10_000)] = 1
    """Number of reward workers."""
    trainer_gpus: str = ""
    """GPUs of the trainer, as in CUDA_VISIBLE_DEVICES ("0,1"). Empty: all GPUs visible to `tether up`. auto:
    the first GPUs, if there are enough for engines, too."""
    rollout_gpus: str = ""
    """GPUs of the rollout workers. Each worker gets the next `engine.tensor_parallel_size` GPUs, starting
    again at the first when the list is used up. Empty: all GPUs visible to `tether up`. auto: the GPUs that
    the trainer does not use."""
    eval_gpus: str = ""
    """GPUs of the evaluation's engine (`eval.every`). Empty: all GPUs visible to `tether up`."""
    reward_gpus: str = ""
    """GPUs of the reward workers, for reward models whose option `device` is a GPU. Empty: all GPUs visible
    to `tether up`."""
    restarts: Annotated[int, Interval(ge=0, le=10**6)] = 5
    """Maximum number of restarts of a service within a minute, or in a row after the same error. One more
    death ends the run; for evaluation, monitor and tracking it ends only the service."""
    spares: bool = True
    """Whether spare processes with all modules imported wait to replace a trainer, ingest, rollout or reward
    worker that dies. All workers with the same settings and GPUs share one spare."""

    @property
    def rollout_workers(self) -> int:
        """Number of rollout workers to start, from the pool or `rollouts`."""
        return pool_size(self.pool) or self.rollouts


def rollout_variables(config: ServicesConfig, tensor_parallel_size: int, index: int) -> dict[str, str]:
    """Return the environment variables that limit rollout worker `index` to its GPUs."""
    gpus = gpu_list(config.rollout_gpus)
    if not gpus:
        return {}
    first = index % max(1, len(gpus) // tensor_parallel_size) * tensor_parallel_size
    return {VISIBLE: ",".join(gpus[first : first + tensor_parallel_size])}


def gpu_variables(gpus: str) -> dict[str, str]:
    """Return the environment variables that limit a process to a list of GPUs; none for an empty list."""
    return {VISIBLE: ",".join(gpu_list(gpus))} if gpu_list(gpus) else {}


def check_gpus(config: ServicesConfig, ranks: int, tensor_parallel_size: int, reward_ranks: int = 1) -> None:
    """Check the lists of GPUs against the number of GPUs that one process of each kind needs.

    Args:
        config: section `[services]`.
        ranks: number of trainer ranks per host.
        tensor_parallel_size: number of GPUs per engine.
        reward_ranks: number of GPUs per reward worker.

    Raises:
        SettingsError: a list is too short, or contains a GPU twice.
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
    """Return the number of GPUs per reward worker: the tensor-parallel size of its largest reward model."""
    options = [entry.options for entry in config.verifiers if entry.name == "reward_model"]
    sizes = [entry.get("tensor_parallel_size", 1) for entry in options]
    return max((size for size in sizes if isinstance(size, int)), default=1)  # other types fail elsewhere


def check_separate_roles(
    placement: PlacementConfig,
    trainer: TrainerConfig,
    frozen: Mapping[str, FrozenConfig],
    *,
    colocated: bool,
) -> None:
    """Check the placement of models on separate ranks.

    Args:
        placement: section `[placement]`.
        trainer: section `[trainer]`.
        frozen: role of a frozen model -> its section.
        colocated: whether trainer and engines take turns on their GPUs.

    Raises:
        SettingsError: a placement is invalid; the message has the setting, its value and the allowed values.
    """
    for role, ranks in placement.ranks.items():
        prefix = f"setting placement.{role}: {ranks}"
        tensor, backend = getattr(placement, f"{role}_tensor_parallel_size"), trainer.backend
        if backend not in BACKENDS.having("remote_frozen"):
            raise SettingsError(f"{prefix}: trainer.backend {backend!r} does not support separate models")
        if backend == "reference" and ranks > 1:
            raise SettingsError(
                f"{prefix}: trainer.backend 'reference' has one rank for a model; set it to 1"
            )
        if tensor > 1 and backend != "megatron":
            raise SettingsError(
                f"setting placement.{role}_tensor_parallel_size: {tensor}: trainer.backend {backend!r} has "
                "no tensor ranks; remove the setting, or use megatron"
            )
        if ranks % tensor:
            raise SettingsError(
                f"{prefix}: placement.{role}_tensor_parallel_size {tensor} does not divide it; set a multiple"
            )
        if colocated:
            raise SettingsError(
                f"{prefix}: with colocated.enabled trainer and engines take turns on all of the trainer's "
                "GPUs, and a model with a GPU of its own cannot; remove one of the two settings"
            )
        if role in frozen and frozen[role].offload:
            raise SettingsError(
                f"setting {role}.offload: the model has ranks of its own (placement.{role}), where nothing "
                "else needs the memory; remove the setting"
            )


def gpu_list(text: str) -> list[str]:
    """Return the GPUs of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]
