"""Computes the expected memory of the trainer before a start, on its GPUs and hosts."""

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from protocol.errors import SettingsError
from protocol.host.machine import memory_available, memory_limit
from protocol.host.owned_directory import SHARED_MEMORY
from services.preflight.critic import critic_architecture
from services.preflight.model import ModelFacts, read_model
from services.preflight.problem import Problem
from services.settings.automatic import visible_gpus
from services.settings.hub import fetch_critic, fetch_frozen, fetch_model, fetch_role
from services.settings.sections import Settings
from trainer.backends.base import FrozenSpec
from trainer.fsdp.memory.expected import ShardedWorkload, read_size, read_workload
from trainer.fsdp.memory.host_memory import ShardedHost
from trainer.megatron.families.reading import architecture_of, read_architecture, read_critic
from trainer.megatron.memory.expected import (
    FrozenShape,
    Workload,
    parameters_of_stage,
)
from trainer.megatron.memory.host_memory import HostWorkload
from trainer.memory.expected import GIB, ITEM_BYTES, TOKENS_MOST, TOKENS_STEP, Planned
from trainer.memory.host import HostRun, host_refusal
from trainer.roles.config import FROZEN_ROLES, REWARD_MODEL


def workload_of(settings: Settings, model: ModelFacts) -> Workload:
    """Return the facts that determine the memory of a `megatron` rank.

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
        shared=settings.shares_masters,
        critic=critic_architecture(settings, model) if settings.is_critic_on_policy_ranks else None,
    )


def critic_workload(settings: Settings, model: ModelFacts) -> Planned:
    """Return the facts that determine the memory of a separate critic rank.

    Raises:
        SettingsError: the backend does not support the model, or a file cannot be read.
    """
    facts: dict[str, Any] = {
        "parallel": settings.placement.layout("critic"),
        "trainer": settings.trainer,
        "optimizer": settings.critic.optimizer(settings.optimizer),
    }
    if settings.trainer.backend == "fsdp":
        ranks = facts["parallel"].tensor_model_parallel_size
        return ShardedWorkload(model=read_size(fetch_critic(settings), ranks), **facts)
    return Workload(architecture=critic_architecture(settings, model), **facts)


def frozen_shapes(settings: Settings) -> Iterator[FrozenShape]:
    """Yield the facts that determine the memory of frozen models on the policy's ranks.

    Raises:
        SettingsError: the backend does not support one of the models.
    """
    for role, directory in fetch_frozen(settings).items():
        if role in settings.placement.ranks:
            continue
        read = read_critic if role == REWARD_MODEL else read_architecture
        yield FrozenShape(read(directory), getattr(settings, role).offload)


def weights_apart(settings: Settings, work: Planned) -> dict[str, int]:
    """Return role -> bytes of weights per GPU, for frozen models on separate ranks.

    Args:
        settings: settings of the run.
        work: workload of the policy, which is the reference model if that has no path.

    Raises:
        SettingsError: the backend does not support a model, or a file cannot be read.
    """
    found = {}
    for role in (role for role in FROZEN_ROLES if role in settings.placement.ranks):
        path = fetch_role(settings, role) if getattr(settings, role).path else None
        parallel = settings.placement.layout(role)
        if isinstance(work, ShardedWorkload):
            size = read_size(path or fetch_model(settings), parallel.tensor_model_parallel_size)
            held = size.parameters // parallel.data_parallel_size
        elif isinstance(work, Workload):
            read = read_critic if role == REWARD_MODEL else read_architecture
            architecture = read(path) if path else work.architecture
            held = parameters_of_stage(replace(work, architecture=architecture, parallel=parallel), 0)
        found[role] = held * ITEM_BYTES[settings.trainer.dtype]
    return found


def expected_gb(settings: Settings, model: ModelFacts) -> float | None:
    """Return the expected peak of a rank, GiB; with the smallest budget if the trainer chooses it.

    None for backends without a memory model.
    """
    work = planned_of(settings, model)
    tokens = settings.trainer.micro_batch_tokens or TOKENS_STEP
    return None if work is None else work.expected(tokens).peak / GIB


def planned_of(settings: Settings, model: ModelFacts) -> Planned | None:
    """Return the workload of the run; None if its backend has no memory model or weights do not exist yet.

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
        frozen.append(FrozenSpec("reference", model.place, is_remote=True))
    return read_workload(
        model.place,
        settings.parallel,
        settings.trainer,
        settings.optimizer,
        settings.lora,
        settings.algorithm,
        frozen,
        fetch_critic(settings) if settings.is_critic_on_policy_ranks else None,
    )


def host_workload_of(
    settings: Settings, model: ModelFacts, *, hosts: int = 1, environ: Mapping[str, str] = os.environ
) -> HostRun[Any] | None:
    """Return the facts that determine the memory of a host with trainer ranks.

    None for backends without a memory model, or if weights do not exist yet.

    Raises:
        SettingsError: the backend does not support the model, or a file cannot be read.
    """
    facts: dict[str, Any] = {
        "hosts": hosts,
        "on_gpu": settings.trainer.device != "cpu" and bool(visible_gpus(environ)),
        "turns": settings.colocated.enabled,
    }
    work = planned_of(settings, model)
    if isinstance(work, Workload):
        return HostWorkload(work=work, **facts)
    return ShardedHost(work=work, **facts) if isinstance(work, ShardedWorkload) else None


def host_memory_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    """Yield a problem if this single host has too little memory for the trainer.

    With several hosts each host checks itself at its start.
    """
    if settings.cluster.nodes > 1:
        return
    try:
        given = host_workload_of(settings, model)
    except SettingsError:  # reported by the checks of model and layout
        return
    if given and (text := host_refusal(given, memory_limit(), "has")):
        yield Problem(text)


def shared_memory_problems(settings: Settings, model: ModelFacts) -> Iterator[Problem]:
    """Yield a problem if shared memory has too little space for the versions that the trainer keeps there."""
    weights = settings.weights
    if weights.transport != "shm" or weights.directory or weights.delta or settings.lora.rank:
        return
    needed = (weights.keep + 1) * model.parameters * ITEM_BYTES[settings.engine.dtype]
    if needed > (total := shutil.disk_usage(SHARED_MEMORY).total):
        yield Problem(
            f"setting weights.keep: {weights.keep} versions, and one that is written, take "
            f"{needed / GIB:.3f} GiB, and {SHARED_MEMORY} has {total / GIB:.3f}: enlarge it (docker run "
            '--shm-size), lower keep, or set weights.transport = "disk"'
        )


def check_host_memory(settings: Settings, hosts: int) -> None:
    """Check that this host has enough free memory for its ranks, before they start.

    Raises:
        SettingsError: memory is insufficient; the message has settings that would fit.
    """
    if settings.trainer.backend not in ("megatron", "fsdp"):
        return
    given = host_workload_of(settings, read_model(settings), hosts=hosts)
    if given and (text := host_refusal(given, memory_available(), "has free")):
        raise SettingsError(text)


def describe_memory(
    settings: Settings, model: ModelFacts, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return lines with the expected memory of the trainer, per rank on its GPU and per host.

    For ranks on a CPU there are no lines, except with `optimizer.cpu_offload`.
    """
    given = host_workload_of(settings, model, hosts=max(1, settings.cluster.nodes), environ=environ)
    if given is None:
        return []
    lines = []
    if given.on_gpu and (work := planned_of(settings, model)):
        lines.append(memory_text(work))
        if served := settings.served_bytes(model.parameters):
            lines.append(
                f"versions that each rank serves by {settings.weights.transport}, on top of that: "
                f"{served / GIB:.1f} GiB, for which a chosen micro-batch leaves room, and as much as two "
                "while one replaces the other"
            )
        lines += [
            f"weights of the {role} on each of its GPUs: {held / GIB:.1f} GiB"
            for role, held in weights_apart(settings, work).items()
        ]
        if settings.placement.critic:
            lines.append(f"{memory_text(critic_workload(settings, model))} (the critic's)")
    if given.on_gpu or settings.optimizer.cpu_offload:
        where = "each host" if given.hosts > 1 else "the host"
        lines.append(f"expected of {where}: {given.expected()}; this one has {_available_memory_text()}")
    return [f"memory   {line}" for line in lines]


def _available_memory_text() -> str:
    return f"{memory_limit() / GIB:.1f} GiB, {memory_available() / GIB:.1f} of it free"


def memory_text(work: Planned) -> str:
    """Format the expected peak of a rank at its budget, or at the smallest and the largest budget."""
    if tokens := work.trainer.micro_batch_tokens:
        expected = work.expected(tokens)
        return f"expected peak of a trainer rank at {tokens} tokens a micro-batch: {expected}"
    smallest, largest = (work.expected(tokens) for tokens in (TOKENS_STEP, TOKENS_MOST))
    return (
        f"expected peak of a trainer rank: {smallest} at {TOKENS_STEP} tokens a micro-batch, "
        f"{largest.peak / GIB:.1f} GiB at {TOKENS_MOST}; it chooses what fits its GPU"
    )
