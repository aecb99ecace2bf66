"""Computes from the settings the host memory of the trainer's ranks. No torch here."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod

from trainer.config import ParallelConfig
from trainer.megatron.families.stages import stage_rules
from trainer.megatron.memory.expected import (
    Workload,
    expected_memory,
    frozen_bytes,
    memory_of_stage,
    parameters_of_stage,
    stepped_of_stage,
)
from trainer.memory.expected import GIB

STATE_BYTES = 12
"""Master and moments of a parameter, float32."""
CHUNK_ELEMENTS = 1 << 26
"""Elements that the optimizer steps together, at least; as in `host_transfers.py`, which needs torch."""
ROOMS = 2
"""Chunks that have room in page-locked memory, in either direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWorkload:
    """Facts that the memory of a host depends on."""

    work: Workload
    hosts: int = 1
    """Hosts of the trainer; each has as many ranks."""
    on_gpu: bool = True
    """Whether ranks compute on GPUs; if not, all that they have is in host memory."""
    turns: bool = False
    """Whether the GPU's state moves to the host while engines have the GPU."""

    @property
    def ranks(self) -> int:
        """Ranks of one host."""
        return self.work.layout.ranks // self.hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedHostMemory:
    """Bytes in the memory of a host, by what they are for."""

    model: int
    """What ranks on a CPU compute with, or what others keep there while engines have the GPU."""
    optimizer: int
    """Masters and moments of `optimizer.cpu_offload`."""
    transfers: int
    """Its gradients and parameters on their way."""
    checkpoint: int
    """Bytes of the copy that is written during the steps."""
    export: int
    """The model as it is exported, on the host of rank 0."""

    @property
    def total(self) -> int:
        """Their sum: all are there while a checkpoint is written."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __str__(self) -> str:
        sizes = ((field.name, getattr(self, field.name)) for field in fields(self))
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes if size)
        return f"{self.total / GIB:.1f} GiB ({parts})"


def expected_host_memory(given: HostWorkload) -> ExpectedHostMemory:
    """Return the memory of the host that takes the most."""
    return max((_host_bytes(given, host) for host in range(given.hosts)), key=lambda found: found.total)


def host_refusal(given: HostWorkload, room: int, setting: str) -> str:
    """Return why a run does not fit the memory of a host, in one sentence with settings that would.

    Args:
        given: the run.
        room: bytes that there are.
        setting: how the room is called, such as "has" or "has free".

    Returns:
        An empty text if it fits.
    """
    needed = expected_host_memory(given)
    if needed.total <= room:
        return ""
    return (
        f"the trainer's {given.ranks} rank(s) on a host are expected to take {needed} of its memory, and "
        f"this host {setting} {room / GIB:.1f} GiB; {_remedy(given, room)}"
    )


def host_alternatives(given: HostWorkload, room: int) -> Iterator[tuple[str, HostWorkload]]:
    """Yield settings that fit, the cheapest first."""
    work = given.work
    parallel = replace(work.parallel, use_distributed_optimizer=True)
    changes = {"parallel.use_distributed_optimizer = true": replace(work, parallel=parallel)}
    if given.on_gpu:
        changes["optimizer.cpu_offload = false"] = work.changed(cpu_offload=False)
    for name, change in changes.items():
        changed = replace(given, work=change)
        if changed != given and _fits(changed, room):
            yield name, changed
    for hosts in range(given.hosts + 1, work.layout.ranks + 1):
        changed = replace(given, hosts=hosts)
        if work.layout.ranks % hosts == 0 and _fits(changed, room):
            yield f"cluster.nodes = {hosts}", changed
            return


def _remedy(given: HostWorkload, room: int) -> str:
    remedies = [_described(given, name, changed) for name, changed in host_alternatives(given, room)]
    if not remedies:
        return (
            "no setting of its ranks would fit: spread them over more hosts ([parallel], cluster.nodes), or "
            "train adapters (lora.rank)"
        )
    return f"it would fit with {', or with '.join(remedies)}"


def _described(given: HostWorkload, name: str, changed: HostWorkload) -> str:
    size = f"{expected_host_memory(changed).total / GIB:.1f} GiB"
    if changed.work.optimizer == given.work.optimizer:
        return f"{name} ({size})"
    least = expected_memory(changed.work, 1024).peak / GIB
    return f"{name} ({size}, and at least {least:.1f} GiB of each GPU)"


def _fits(given: HostWorkload, room: int) -> bool:
    return expected_host_memory(given).total <= room


def _host_bytes(given: HostWorkload, host: int) -> ExpectedHostMemory:
    """Return the memory of one host: its ranks follow each other, and ranks of a stage do, too."""
    optimizer = transfers = checkpoint = model = 0
    ranks = range(host * given.ranks, (host + 1) * given.ranks)
    for work, rank in product(given.work.models, ranks):
        place = work.layout.place_of(rank)
        stepped = stepped_of_stage(work, place.pp)
        if work.parallel.use_distributed_optimizer or place.dp == place.cp == 0:
            checkpoint += stepped * STATE_BYTES  # of what several ranks have, the first one writes it
        model += _device_bytes(given, work, place.pp)
        if work.optimizer.cpu_offload:
            optimizer += stepped * STATE_BYTES
            transfers += _transfers(work, place.pp, stepped)
    return ExpectedHostMemory(
        model=model,
        optimizer=optimizer,
        transfers=transfers,
        checkpoint=checkpoint,
        export=_exported(given.work) if host == 0 else 0,
    )


def _device_bytes(given: HostWorkload, work: Workload, stage: int) -> int:
    """Return the bytes of a rank that are on the host because it has no device, or not always."""
    found, resting = memory_of_stage(work, 1, stage), sum(frozen_bytes(work, stage, offload=True))
    if not given.on_gpu:
        return found.parameters + found.gradients + found.optimizer + resting
    return resting + (found.parameters + found.optimizer if given.turns else 0)


def _transfers(work: Workload, stage: int, stepped: int) -> int:
    rules = stage_rules(work.architecture, work.layout, stage)
    largest = max(prod(rule.local_shape(work.layout.grid(expert=rule.expert))) for rule in rules)
    gradient = 4 if work.optimizer.grad_reduce_in_fp32 else work.item
    return ROOMS * min(stepped, max(CHUNK_ELEMENTS, largest)) * (gradient + work.item)


def _exported(work: Workload) -> int:
    whole = replace(work, parallel=ParallelConfig())
    return parameters_of_stage(whole, 0) * work.item
