"""Section `[services]`: how many processes of each kind `tether up` starts, and which GPUs they see."""

from dataclasses import dataclass

from protocol.errors import SettingsError
from services.settings.engine_pool import PoolEntry, pool_size

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class ServicesConfig:
    """Section `[services]`: how many of each `tether up` starts, where, and how it treats those that die."""

    rollouts: int = 1
    """Workers on `[engine]`; with a pool, its own counts hold."""
    pool: tuple[PoolEntry, ...] = ()
    """Workers on different engines."""
    rewards: int = 1
    trainer_gpus: str = ""
    """GPUs of the trainer, as in CUDA_VISIBLE_DEVICES ("0,1"); empty: what `tether up` itself sees."""
    rollout_gpus: str = ""
    """GPUs of the rollout workers: each gets `engine.tensor_parallel_size` of them in turn, and begins again
    with the first when they are used up; empty: all see what `tether up` itself sees."""
    restarts: int = 5
    """Restarts of one service within a minute after which the run is given up."""

    @property
    def rollout_workers(self) -> int:
        return pool_size(self.pool) or self.rollouts


def rollout_variables(config: ServicesConfig, tensor_parallel_size: int, index: int) -> dict[str, str]:
    """What makes rollout worker `index` see its own GPUs only."""
    gpus = listed(config.rollout_gpus)
    if not gpus:
        return {}
    turn = index % max(1, len(gpus) // tensor_parallel_size)
    return {VISIBLE: ",".join(gpus[turn * tensor_parallel_size : (turn + 1) * tensor_parallel_size])}


def trainer_variables(config: ServicesConfig) -> dict[str, str]:
    """What makes the trainer see its own GPUs only."""
    gpus = listed(config.trainer_gpus)
    return {VISIBLE: ",".join(gpus)} if gpus else {}


def check_gpus(config: ServicesConfig, ranks: int, tensor_parallel_size: int) -> None:
    """Compare the lists with how many GPUs one process of each kind needs.

    Raises:
        SettingsError: a list is too short, or names a GPU twice.
    """
    for name, text, needed, why in (
        ("trainer_gpus", config.trainer_gpus, ranks, f"the trainer has {ranks} ranks"),
        (
            "rollout_gpus",
            config.rollout_gpus,
            tensor_parallel_size,
            f"engine.tensor_parallel_size is {tensor_parallel_size}",
        ),
    ):
        gpus = listed(text)
        if gpus and len(gpus) < needed:
            raise SettingsError(f"setting services.{name}: {text!r} names {len(gpus)} GPUs, {why}")
        if len(set(gpus)) < len(gpus):
            raise SettingsError(f"setting services.{name}: {text!r} names a GPU twice")


def listed(text: str) -> list[str]:
    """The GPUs of a list."""
    return [part.strip() for part in text.split(",") if part.strip()]
