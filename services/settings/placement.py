"""Defines section `[services]`, and assigns GPUs to the processes that `tether up` starts."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from protocol.errors import SettingsError
from protocol.paths import set_first
from services.settings.engine_pool import PoolEntry, pool_size

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
    """Restarts of one service within a minute; one death more ends the run (of evaluation, page and
    tracking: only them)."""
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


def check_gpus(config: ServicesConfig, ranks: int, tensor_parallel_size: int) -> None:
    """Compare the lists of GPUs with how many GPUs one process of each kind needs.

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
        ("reward_gpus", config.reward_gpus, 1, ""),
    ):
        gpus = gpu_list(text)
        if gpus and len(gpus) < count:
            raise SettingsError(f"setting services.{name}: {text!r} names {len(gpus)} GPUs, {reason}")
        if len(set(gpus)) < len(gpus):
            raise SettingsError(f"setting services.{name}: {text!r} names a GPU twice")


def gpu_list(text: str) -> list[str]:
    """Return the GPUs of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]
