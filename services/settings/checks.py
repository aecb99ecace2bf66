"""Checks settings against each other: ranges, names, and which choices go together."""

from protocol.choices import checked_name
from protocol.device.shared_layout import TRANSPORT
from protocol.errors import SettingsError
from protocol.ids import checked_run_id
from rollout.engines.base import DTYPES
from rollout.engines.registry import CAN_SHARE, CAN_SLEEP, ENGINES, SERVE_ADAPTERS
from services.settings.engine_pool import check_pool
from services.settings.placement import check_gpus, listed
from services.settings.sections import Settings
from trainer.algorithms.registry import ALGORITHMS
from trainer.config import WeightConfig
from trainer.registry import BACKENDS
from trainer.weights.registry import TRANSPORTS


def check_shared(settings: Settings) -> None:
    """Nothing to do with another transport.

    Raises:
        SettingsError: the first setting that does not go with it, and what it has to be.
    """
    if settings.weights.transport != TRANSPORT:
        return
    trainer, engine, services = settings.trainer, settings.engine, settings.services
    gpus = (listed(services.trainer_gpus), listed(services.rollout_gpus))
    wants = CAN_SHARE.get(engine.name)
    wrong = {
        f"engine.name is {engine.name!r}; it has to be {' or '.join(CAN_SHARE)}": wants is None,
        f"trainer.backend is {trainer.backend!r}; with engine.name {engine.name!r} it has to be {wants!r}": trainer.backend
        != wants,
        f"[parallel] asks for {settings.parallel.world_size} ranks; the trainer has to be one": settings.parallel.world_size
        != 1,
        f"engine.tensor_parallel_size is {engine.tensor_parallel_size}; it has to be 1": engine.tensor_parallel_size
        != 1,
        "engine.enable_sleep_mode is true; the trainer computes with the engine's memory": engine.enable_sleep_mode,
        f"services.rollouts is {services.rollouts}; there can be one rollout worker": services.rollouts > 1,
        "services.pool names rollout workers; there can be one, on [engine]": bool(services.pool),
        f"lora.rank is {settings.lora.rank}; adapters are not shared": settings.lora.rank > 0,
        "colocated.enabled is true; who shares tensors does not take turns": settings.colocated.enabled,
        f"trainer.dtype is {trainer.dtype}, engine.dtype {engine.dtype}; they have to be the same": trainer.dtype
        != engine.dtype,
        f"services.trainer_gpus is {services.trainer_gpus!r}, services.rollout_gpus {services.rollout_gpus!r}; they have to name the same "
        "GPU": gpus[0][:1] != gpus[1][:1],
    }
    for said, is_wrong in wrong.items():
        if is_wrong:
            raise SettingsError(f"setting weights.transport: with {TRANSPORT!r}, {said}")


def check_workers(weights: WeightConfig, rollouts: int) -> None:
    """Before the number of rollout workers of a running `tether up` is changed. Raises SettingsError."""
    if weights.transport == TRANSPORT and rollouts > 1:
        raise SettingsError(
            f"rollouts={rollouts}: with weights.transport {TRANSPORT!r} there can be one rollout worker"
        )


RANGES: dict[str, tuple[float, float]] = {
    "run.steps": (1, 1e9),
    "services.rollouts": (0, 10_000),
    "services.rewards": (0, 10_000),
    "ledger.archive_limit": (1, 1e9),
    "bound.max_staleness": (0, 1000),
    "bound.groups_per_step": (1, 1e6),
    "bound.max_attempts": (1, 1e6),
    "bound.drop_share": (0, 1),
    "bound.drop_window": (1, 1e6),
    "rollout.groups_in_flight": (1, 1e5),
    "rollout.lease_s": (0.5, 1e6),
    "sampling.samples_per_prompt": (1, 1e5),
    "sampling.max_tokens": (1, 1e7),
    "sampling.temperature": (0, 100),
    "optimizer.lr": (0, 1e3),
    "trainer.micro_batch_size": (1, 1e6),
    "trainer.checkpoint_every": (1, 1e9),
    "trainer.keep_checkpoints": (1, 1e6),
    "trainer.archive_mb": (0, 1e9),
    "trainer.memory_gb": (0, 1e6),
    "engine.staging_mb": (0, 1e9),
    "engine.buffer_size_gb": (0, 1e6),
    "engine.max_batch_tokens": (0, 1e9),
    "colocated.wait_s": (1, 1e6),
    "parallel.tensor_model_parallel_size": (1, 4096),
    "parallel.pipeline_model_parallel_size": (1, 4096),
    "parallel.data_parallel_size": (1, 4096),
    "weights.bucket_mb": (1, 1e5),
    "lora.rank": (0, 1e5),
}
"""Setting -> smallest and largest value."""


def check_settings(settings: Settings) -> None:
    checked_run_id(settings.run.name)
    checked_name(settings.engine.name, ENGINES, "setting engine.name:")
    checked_name(settings.engine.dtype, DTYPES, "setting engine.dtype:")
    checked_name(settings.trainer.backend, BACKENDS, "setting trainer.backend:")
    checked_name(settings.algorithm.name, ALGORITHMS, "setting algorithm.name:")
    if settings.lora.rank and settings.engine.name not in SERVE_ADAPTERS:
        raise SettingsError(
            f"setting lora.rank: engine {settings.engine.name!r} does not serve adapters; use {' or '.join(SERVE_ADAPTERS)}"
        )
    if settings.colocated.enabled and settings.engine.name not in CAN_SLEEP:
        raise SettingsError(
            f"setting colocated.enabled: engine {settings.engine.name!r} cannot sleep; use {' or '.join(CAN_SLEEP)}"
        )
    if settings.colocated.enabled and settings.services.pool:
        raise SettingsError(
            "settings colocated.enabled and services.pool exclude each other: engines that share a GPU are of one kind"
        )
    checked_name(settings.weights.transport, TRANSPORTS, "setting weights.transport:")
    for dotted, (low, high) in RANGES.items():
        section, key = dotted.split(".")
        value = getattr(getattr(settings, section), key)
        if not low <= value <= high:
            raise SettingsError(f"setting {dotted}: {value} is not between {low:g} and {high:g}")
    check_pool(settings.services.pool, settings.engine)
    check_gpus(settings.services, settings.parallel.world_size, settings.engine.tensor_parallel_size)
    check_shared(settings)
    if settings.services.pool and settings.services.rollouts != 1:
        raise SettingsError("settings services.pool and services.rollouts exclude each other: give one")
    if settings.model.path and settings.model.scratch:
        raise SettingsError("settings model.path and model.scratch exclude each other: give one")
    if settings.model.path and not (settings.model_dir / "config.json").is_file():
        raise SettingsError(
            f"setting model.path: no config.json in {settings.model_dir}; give a Hugging Face model directory"
        )
