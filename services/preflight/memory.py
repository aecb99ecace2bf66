"""Says before a start how much memory the trainer is expected to take, on its GPUs and in its hosts."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from protocol.device.shared_layout import TRANSPORT
from protocol.errors import SettingsError
from protocol.host.machine import memory_available, memory_limit
from services.preflight.critic import critic_architecture
from services.preflight.model import ModelFacts, read_model
from services.preflight.problem import Problem
from services.settings.automatic import visible_gpus
from services.settings.hub import fetch_critic, fetch_frozen, fetch_role
from services.settings.sections import Settings
from trainer.backends.base import FrozenSpec
from trainer.fsdp.expected import ShardedWorkload, read_workload
from trainer.megatron.families.reading import architecture_of, read_architecture
from trainer.megatron.memory.expected import (
    FrozenShape,
    Workload,
    parameters_of_stage,
)
from trainer.megatron.memory.host_memory import HostWorkload, expected_host_memory, host_refusal
from trainer.memory.expected import GIB, ITEM_BYTES, TOKENS_MOST, TOKENS_STEP, Planned
from trainer.roles.config import FROZEN_ROLES


def workload_of(settings: Settings, model: ModelFacts) -> Workload:
    """Return the facts that a `megatron` rank's memory depends on.

    Raises:
        SettingsError: the backend does not support the model.
    """
    return Workload(
        architecture=architecture_of(dict(model.config), model.place / "config.json"),
        parallel=settings.parallel,
        trainer=settings.trainer,
        optimizer=settings.optimizer,
        adapters=settings.lora,
        reference=settings.algorithm.kl_coef > 0
        and not settings.lora.rank
        and not settings.reference.path
        and not settings.placement.reference,
        frozen=tuple(frozen_shapes(settings)),
        shared=settings.weights.transport == TRANSPORT,
        critic=critic_architecture(settings, model) if settings.critic_beside else None,
    )


def critic_workload(settings: Settings, model: ModelFacts) -> Workload:
    """Return the facts that the memory of a `megatron` rank with the critic alone depends on.

    Raises:
        SettingsError: the backend does not support the model.
    """
    return Workload(
        architecture=critic_architecture(settings, model),
        parallel=settings.placement.layout("critic"),
        trainer=settings.trainer,
        optimizer=settings.critic.optimizer(settings.optimizer),
    )


def frozen_shapes(settings: Settings) -> Iterator[FrozenShape]:
    """Yield the facts that the memory of models depends on that are on the policy's ranks and not trained.

    Raises:
        SettingsError: the backend does not support one.
    """
    for role, directory in fetch_frozen(settings).items():
        if role in settings.placement.ranks:
            continue
        yield FrozenShape(read_architecture(directory), getattr(settings, role).offload)


def weights_apart(settings: Settings, work: Workload) -> dict[str, int]:
    """Return the bytes of weights on each GPU of a frozen model that has ranks of its own, by its role.

    Args:
        settings: the run's settings.
        work: the policy's, which is the reference model where that has no path.

    Raises:
        SettingsError: the backend does not support one.
    """
    found = {}
    for role in (role for role in FROZEN_ROLES if role in settings.placement.ranks):
        path = getattr(settings, role).path
        architecture = read_architecture(fetch_role(settings, role)) if path else work.architecture
        alone = replace(work, architecture=architecture, parallel=settings.placement.layout(role))
        found[role] = parameters_of_stage(alone, 0) * ITEM_BYTES[settings.trainer.dtype]
    return found


def expected_gb(settings: Settings, model: ModelFacts) -> float | None:
    """Return the expected peak of a rank, GiB; with the smallest budget if the trainer is to choose it.

    None for backends without memory arithmetic.
    """
    work = planned_of(settings, model)
    tokens = settings.trainer.micro_batch_tokens or TOKENS_STEP
    return None if work is None else work.expected(tokens).peak / GIB


def planned_of(settings: Settings, model: ModelFacts) -> Planned | None:
    """Return the run as its backend computes its memory; None if it does not, or weights are yet to be made.

    Raises:
        SettingsError: the backend does not support the model, or a file cannot be read.
    """
    if settings.trainer.backend == "fsdp" and model.is_made:
        return _sharded_workload(settings, model)
    return workload_of(settings, model) if settings.trainer.backend == "megatron" else None


def _sharded_workload(settings: Settings, model: ModelFacts) -> ShardedWorkload:
    apart = settings.placement.ranks
    frozen = [
        FrozenSpec(role, path, getattr(settings, role).offload, role in apart)
        for role, path in fetch_frozen(settings).items()
    ]
    if "reference" in apart and not settings.reference.path:
        frozen.append(FrozenSpec("reference", model.place, apart=True))
    return read_workload(
        model.place,
        settings.parallel,
        settings.trainer,
        settings.optimizer,
        settings.lora,
        settings.algorithm,
        frozen,
        fetch_critic(settings) if settings.needs_critic else None,
    )


def host_workload_of(
    settings: Settings, model: ModelFacts, *, hosts: int = 1, environ: Mapping[str, str] = os.environ
) -> HostWorkload:
    """Return the facts that the memory of a host with `megatron` ranks depends on.

    Raises:
        SettingsError: the backend does not support the model.
    """
    return HostWorkload(
        work=workload_of(settings, model),
        hosts=hosts,
        on_gpu=settings.trainer.device != "cpu" and bool(visible_gpus(environ)),
        turns=settings.colocated.enabled,
    )


def host_memory_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    """Yield the problem if this host alone has too little memory for the trainer.

    With several hosts each one checks itself when it starts.
    """
    if settings.trainer.backend == "megatron" and settings.cluster.nodes <= 1:
        try:
            text = host_refusal(host_workload_of(settings, model), memory_limit(), "has")
        except SettingsError:  # of the model or the layout, which is a problem of its own
            return
        if text:
            yield Problem(text)


def check_host_memory(settings: Settings, hosts: int) -> None:
    """Check that this host has enough free memory for its ranks, before they start.

    Raises:
        SettingsError: it has not; names settings that would fit.
    """
    if settings.trainer.backend == "megatron":
        given = host_workload_of(settings, read_model(settings), hosts=hosts)
        if text := host_refusal(given, memory_available(), "has free"):
            raise SettingsError(text)


def describe_memory(
    settings: Settings, model: ModelFacts, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return lines with the expected memory of the trainer: of a rank on its GPU, and of a host.

    There is none for ranks on a CPU, but for `optimizer.cpu_offload`. The memory of a host is of `megatron`.
    """
    if settings.trainer.backend != "megatron":
        on_gpu = settings.trainer.device != "cpu" and bool(visible_gpus(environ))
        work = planned_of(settings, model) if on_gpu else None
        return [] if work is None else [f"memory   {memory_text(work)}"]
    workload = host_workload_of(settings, model, hosts=max(1, settings.cluster.nodes), environ=environ)
    lines = [memory_text(workload.work)] if workload.on_gpu else []
    if workload.on_gpu:
        apart = weights_apart(settings, workload.work)
        lines += [
            f"weights of the {role} on each of its GPUs: {held / GIB:.1f} GiB" for role, held in apart.items()
        ]
        if settings.placement.critic:
            lines.append(f"{memory_text(critic_workload(settings, model))} (the critic's)")
    if workload.on_gpu or settings.optimizer.cpu_offload:
        where = "each host" if workload.hosts > 1 else "the host"
        lines.append(f"expected of {where}: {expected_host_memory(workload)}; this one has {_has()}")
    return [f"memory   {line}" for line in lines]


def _has() -> str:
    return f"{memory_limit() / GIB:.1f} GiB, {memory_available() / GIB:.1f} of it free"


def memory_text(work: Planned) -> str:
    """Return the expected peak of a rank at its budget, or at the smallest and the largest one."""
    if tokens := work.trainer.micro_batch_tokens:
        expected = work.expected(tokens)
        return f"expected peak of a trainer rank at {tokens} tokens a micro-batch: {expected}"
    least, most = (work.expected(tokens) for tokens in (TOKENS_STEP, TOKENS_MOST))
    return (
        f"expected peak of a trainer rank: {least} at {TOKENS_STEP} tokens a micro-batch, "
        f"{most.peak / GIB:.1f} GiB at {TOKENS_MOST}; it chooses what fits its GPU"
    )
