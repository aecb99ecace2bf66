"""Computes the host memory of `megatron` ranks from the settings. Does not import torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from trainer.config import ParallelConfig
from trainer.megatron.families.stages import stage_rules
from trainer.megatron.memory.expected import (
    Workload,
    frozen_bytes,
    memory_of_stage,
    parameters_of_stage,
    stepped_of_stage,
)
from trainer.memory.host import STATE_BYTES, ExpectedHostMemory, HostRun, transfer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWorkload(HostRun[Workload]):
    """Host workload of `megatron` ranks."""

    def expected(self) -> ExpectedHostMemory:
        """Return the memory of the host with the highest total."""
        return max((_host_bytes(self, host) for host in range(self.hosts)), key=lambda found: found.total)

    def alternatives(self) -> Iterator[tuple[str, "HostWorkload"]]:
        """Yield settings that may need less memory, each with its workload, cheapest first."""
        work = self.work
        parallel = replace(work.parallel, use_distributed_optimizer=True)
        distributed = replace(work, parallel=parallel)
        yield "parallel.use_distributed_optimizer = true", replace(self, work=distributed)
        if self.on_gpu:
            on_device = work.changed(cpu_offload=False)
            yield "optimizer.cpu_offload = false", replace(self, work=on_device)


def _host_bytes(workload: HostWorkload, host: int) -> ExpectedHostMemory:
    """Return the memory of one host. Hosts have consecutive ranks, and so do pipeline stages."""
    optimizer = transfers = checkpoint = model = 0
    ranks = range(host * workload.ranks, (host + 1) * workload.ranks)
    for work, rank in product(workload.work.models, ranks):
        place = work.layout.place_of(rank)
        stepped = stepped_of_stage(work, place.pp)
        if work.parallel.use_distributed_optimizer or place.dp == place.cp == 0:
            checkpoint += stepped * STATE_BYTES  # replicated state is written by the first rank
        model += _device_bytes(workload, work, place.pp)
        if work.optimizer.cpu_offload:
            optimizer += stepped * STATE_BYTES
            transfers += _transfers(work, place.pp, stepped)
    return ExpectedHostMemory(
        model=model,
        optimizer=optimizer,
        transfers=transfers,
        checkpoint=checkpoint,
        export=_exported(workload.work) // workload.hosts,
    )


def _device_bytes(workload: HostWorkload, work: Workload, stage: int) -> int:
    """Return a rank's bytes of models in host memory: without a device, or while offloaded."""
    found, resting = memory_of_stage(work, 1, stage), sum(frozen_bytes(work, stage, offload=True))
    if not workload.on_gpu:
        return found.parameters + found.gradients + found.optimizer + resting
    return resting + (found.parameters + found.optimizer if workload.turns else 0)


def _transfers(work: Workload, stage: int, stepped: int) -> int:
    rules = stage_rules(work.architecture, work.layout, stage)
    largest = max(prod(rule.local_shape(work.layout.grid(expert=rule.expert))) for rule in rules)
    gradient = 4 if work.optimizer.grad_reduce_in_fp32 else work.item
    return transfer_bytes(stepped, largest, gradient + work.item)


def _exported(work: Workload) -> int:
    whole = replace(work, parallel=ParallelConfig())
    return parameters_of_stage(whole, 0) * work.item
