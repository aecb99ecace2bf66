"""Checks that trainer and engine can compute with one copy of the weights."""

from protocol.device.shared_layout import TRANSPORT
from protocol.errors import SettingsError
from rollout.engines.registry import ENGINES
from services.settings.processes import gpu_list
from services.settings.sections import Settings


def check_shared(settings: Settings) -> None:
    """Check the settings that the transport `shared` requires; other transports pass.

    Raises:
        SettingsError: names the first setting that does not fit, and what it has to be.
    """
    if settings.weights.transport != TRANSPORT:
        return
    for is_wrong, problem in _problems_of_shared(settings):
        if is_wrong:
            raise SettingsError(f"setting weights.transport: with {TRANSPORT!r}, {problem}")


def are_apart(settings: Settings, rollouts: int) -> bool:
    """Return whether one of so many rollout workers would not be on the GPUs of the trainer's ranks."""
    return rollouts > 1 and len(gpu_list(settings.services.rollout_gpus)) > _ranks(settings)


def _problems_of_shared(settings: Settings) -> tuple[tuple[bool, str], ...]:
    trainer, engine, services = settings.trainer, settings.engine, settings.services
    sharing = ENGINES.having("shares_with")
    backend = ENGINES[engine.name].shares_with if engine.name in sharing else None
    ranks = _ranks(settings)
    trainer_gpus, rollout_gpus = gpu_list(services.trainer_gpus), gpu_list(services.rollout_gpus)
    return (
        (backend is None, f"engine.name is {engine.name!r}; it has to be {' or '.join(sharing)}"),
        (
            trainer.backend != backend,
            f"trainer.backend is {trainer.backend!r}; with engine.name {engine.name!r} "
            f"it has to be {backend!r}",
        ),
        *_ranks_of_shared(settings, ranks),
        (
            engine.enable_sleep_mode,
            "engine.enable_sleep_mode is true; the trainer computes with the engine's memory",
        ),
        (
            bool(services.pool),
            "services.pool names rollout workers; all of them have to be on [engine]",
        ),
        (
            settings.lora.rank > 0 and engine.name not in ENGINES.having("shares_base"),
            f"lora.rank is {settings.lora.rank}; engine.name {engine.name!r} does not keep the base of "
            f"adapters as it is trained; use {' or '.join(ENGINES.having('shares_base'))}",
        ),
        *(_master_problems(settings) if settings.shares_masters else ()),
        (
            are_apart(settings, services.rollouts),
            f"services.rollouts is {services.rollouts} on services.rollout_gpus {services.rollout_gpus!r}; "
            "several have to be on the GPUs of the trainer's ranks alone, as any may be the one that shares",
        ),
        (
            settings.colocated.enabled,
            "colocated.enabled is true; processes that share tensors do not take turns",
        ),
        (
            trainer.dtype != engine.dtype,
            f"trainer.dtype is {trainer.dtype}, engine.dtype {engine.dtype}; they have to be the same",
        ),
        (
            trainer_gpus[:ranks] != rollout_gpus[:ranks],
            f"services.trainer_gpus is {services.trainer_gpus!r}, services.rollout_gpus "
            f"{services.rollout_gpus!r}; they have to name the same GPU",
        ),
    )


def _master_problems(settings: Settings) -> tuple[tuple[bool, str], ...]:
    """Return what does not go with weights that change at every version in the engine's memory alone."""
    trainer, services = settings.trainer, settings.services
    return (
        (
            services.rollouts > 1,
            f"services.rollouts is {services.rollouts}; there can be one rollout worker: the trainer waits "
            "for the engine that it computes with, and its next step overwrites what others would read",
        ),
        (
            trainer.publish_every != 1,
            f"trainer.publish_every is {trainer.publish_every}; it has to be 1: a step computes with the "
            "weights that the engine made of the version before",
        ),
        (
            trainer.updates > 1,
            f"a step makes {trainer.updates} updates; it has to be one: the second would compute with the "
            "engine's weights, which are a version's",
        ),
        (
            settings.optimizer.cpu_offload,
            "optimizer.cpu_offload is true; the engine reads the masters on the device",
        ),
    )


def _ranks(settings: Settings) -> int:
    """Return the ranks of the trainer, and of the engine that shares with it: one of each on a GPU."""
    return settings.engine.tensor_parallel_size if settings.engine.name == "megatron" else 1


def _ranks_of_shared(settings: Settings, ranks: int) -> tuple[tuple[bool, str], ...]:
    engine = settings.engine
    tensor = settings.parallel.tensor_model_parallel_size
    return (
        (
            engine.tensor_parallel_size != ranks,
            f"engine.tensor_parallel_size is {engine.tensor_parallel_size}; it has to be 1",
        ),
        (
            settings.trainer_ranks != ranks or tensor != ranks,
            f"[parallel] and [placement] ask for {settings.trainer_ranks} ranks, {tensor} of them tensor "
            f"ranks; the trainer has to be as many tensor ranks as the engine, {ranks}",
        ),
    )
