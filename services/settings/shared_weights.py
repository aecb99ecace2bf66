"""Checks that trainer and engine can compute with a single copy of the weights."""

from collections.abc import Iterator
from dataclasses import replace

from protocol.device.shared_layout import TRANSPORT
from protocol.errors import SettingsError
from protocol.weights.lora import LoraConfig
from rollout.engines.base import EngineConfig
from rollout.engines.registry import ENGINES
from services.settings.processes import gpu_list
from services.settings.sections import Settings


def check_shared(settings: Settings) -> None:
    """Check the settings that the transport `shared` requires; return at once for other transports.

    Raises:
        SettingsError: a setting does not fit; the message has the first such setting and its required value.
    """
    if settings.weights.transport != TRANSPORT:
        return
    for is_wrong, problem in _sharing_problems(settings):
        if is_wrong:
            raise SettingsError(f"setting weights.transport: with {TRANSPORT!r}, {problem}")


def can_share(engine: EngineConfig, lora: LoraConfig) -> bool:
    """Return whether a trainer can compute with an engine's live weights, or with its adapters' base."""
    return engine.name in ENGINES.having("shares_base" if lora.rank else "shares_with")


def has_workers_off_trainer_gpus(settings: Settings, rollouts: int) -> bool:
    """Return whether some of `rollouts` workers that can share would not be on the trainer's GPUs."""
    engines = _engines(settings)
    return len(gpu_list(settings.services.rollout_gpus)) > _sharing_ranks(settings) and any(
        can_share(engines[index % len(engines)], settings.lora) for index in range(1, rollouts)
    )


def _engines(settings: Settings) -> list[EngineConfig]:
    """Return the engine settings of each worker, for one round of the pool."""
    return [
        replace(settings.engine, **entry.engine)
        for entry in settings.services.pool
        for _ in range(entry.count)
    ] or [settings.engine]


def _sharing_engines(settings: Settings) -> list[EngineConfig]:
    """Return the engines that can share; if there are none, the first engine, which is then reported."""
    engines = _engines(settings)
    return [engine for engine in engines if can_share(engine, settings.lora)] or engines[:1]


def _sharing_problems(settings: Settings) -> Iterator[tuple[bool, str]]:
    trainer, services, ranks = settings.trainer, settings.services, _sharing_ranks(settings)
    trainer_gpus, rollout_gpus = gpu_list(services.trainer_gpus), gpu_list(services.rollout_gpus)
    for engine in _sharing_engines(settings):
        yield from _engine_problems(settings, engine)
    if settings.shares_masters:
        yield from _master_problems(settings)
    yield (
        has_workers_off_trainer_gpus(settings, services.rollout_workers),
        f"{services.rollout_workers} rollout workers are on services.rollout_gpus {services.rollout_gpus!r}; "
        "those that can share must be on the GPUs of the trainer's ranks alone, as any may be the one "
        "that does",
    )
    yield (
        settings.colocated.enabled,
        "colocated.enabled is true; processes that share tensors do not take turns",
    )
    yield (
        trainer.dtype != settings.engine.dtype,
        f"trainer.dtype is {trainer.dtype}, engine.dtype {settings.engine.dtype}; they must be the same",
    )
    yield (
        trainer_gpus[:ranks] != rollout_gpus[:ranks],
        f"services.trainer_gpus is {services.trainer_gpus!r}, services.rollout_gpus "
        f"{services.rollout_gpus!r}; they have to name the same GPU",
    )


def _engine_problems(settings: Settings, engine: EngineConfig) -> Iterator[tuple[bool, str]]:
    """Yield checks of an engine that shares its weights: whether it fails, and the problem."""
    trainer, ranks = settings.trainer, _sharing_ranks(settings)
    sharing, having_base = ENGINES.having("shares_with"), ENGINES.having("shares_base")
    backends = ENGINES[engine.name].shares_with if engine.name in sharing else ()
    yield not backends, f"engine.name is {engine.name!r}; it must be {' or '.join(sharing)}"
    yield (
        trainer.backend not in backends,
        f"trainer.backend is {trainer.backend!r}; with engine.name {engine.name!r} "
        f"it must be {' or '.join(map(repr, backends))}",
    )
    yield from _rank_problems(settings, engine, ranks)
    yield (
        engine.enable_sleep_mode,
        "engine.enable_sleep_mode is true; the trainer computes with the engine's memory",
    )
    yield (
        settings.lora.rank > 0 and engine.name not in having_base,
        f"lora.rank is {settings.lora.rank}; engine.name {engine.name!r} does not keep the base of "
        f"adapters as it is trained; use {' or '.join(having_base)}",
    )


def _master_problems(settings: Settings) -> tuple[tuple[bool, str], ...]:
    """Return checks for masters that change with every version and exist only in the engine's memory."""
    trainer, services = settings.trainer, settings.services
    return (
        (
            bool(services.pool),
            "services.pool names several rollout workers; there can be one, on [engine]: a version is the "
            "trainer's masters, which its next step overwrites; under [lora] all get the adapters",
        ),
        (
            services.rollouts > 1,
            f"services.rollouts is {services.rollouts}; there can be one rollout worker: the trainer waits "
            "for the engine that it computes with, and its next step overwrites what others would read",
        ),
        (
            trainer.publish_every != 1,
            f"trainer.publish_every is {trainer.publish_every}; it must be 1: a step computes with the "
            "weights that the engine made of the version before",
        ),
        (
            trainer.updates > 1,
            f"a step makes {trainer.updates} updates; it must be one: the second would compute with the "
            "engine's weights, which are a version's",
        ),
        (
            settings.optimizer.cpu_offload,
            "optimizer.cpu_offload is true; the engine reads the masters on the device",
        ),
    )


def _sharing_ranks(settings: Settings) -> int:
    """Return the number of trainer ranks that share with the engine, one engine rank per GPU."""
    return _sharing_engines(settings)[0].tensor_parallel_size if settings.trainer.backend == "megatron" else 1


def _rank_problems(settings: Settings, engine: EngineConfig, ranks: int) -> tuple[tuple[bool, str], ...]:
    tensor = settings.parallel.tensor_model_parallel_size
    return (
        (
            engine.tensor_parallel_size != ranks,
            f"engine.tensor_parallel_size is {engine.tensor_parallel_size}; it must be {ranks}",
        ),
        (
            settings.trainer_ranks != ranks or tensor != ranks,
            f"[parallel] and [placement] ask for {settings.trainer_ranks} ranks, {tensor} of them tensor "
            f"ranks; the trainer must have as many tensor ranks as the engine, {ranks}",
        ),
    )
