"""Describes the host memory of the trainer's ranks, and settings that would fit. Does not import torch."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from trainer.memory.expected import GIB, Planned

Work = TypeVar("Work", bound=Planned)
STATE_BYTES = 12
"""Bytes per parameter of its float32 master and moments."""
CHUNK_ELEMENTS = 1 << 26
"""Minimum number of elements per optimizer chunk; equals the value in `host_transfers.py`, which imports
torch."""
BUFFERS = 2
"""Number of page-locked chunk buffers per direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedHostMemory:
    """Bytes in host memory, by purpose."""

    model: int
    """Models of ranks on a CPU, or models moved to the host while engines use the GPU."""
    optimizer: int
    """Masters and moments of `optimizer.cpu_offload`."""
    transfers: int
    """Gradients and parameters in transfer for `optimizer.cpu_offload`."""
    checkpoint: int
    """Copy of the state that is written in the background."""
    export: int
    """Tensors that the host's ranks export; about equal on all hosts."""

    @property
    def total(self) -> int:
        """Sum of all purposes, reached while a checkpoint is written."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))

    def __str__(self) -> str:
        sizes = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes if size)
        return f"{self.total / GIB:.1f} GiB ({parts})"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRun(ABC, Generic[Work]):
    """Facts that determine the memory of a host. A backend's subclass computes the memory."""

    work: Work
    """Workload of the run."""
    hosts: int = 1
    """Number of hosts of the trainer, with equal numbers of ranks."""
    on_gpu: bool = True
    """Whether ranks compute on GPUs; otherwise, their whole state is in host memory."""
    turns: bool = False
    """Whether GPU state moves to the host while engines use the GPU."""

    @property
    def ranks(self) -> int:
        """Number of ranks per host."""
        return self.work.parallel.world_size // self.hosts

    @abstractmethod
    def expected(self) -> ExpectedHostMemory:
        """Return the memory of the host with the highest total."""

    @abstractmethod
    def alternatives(self) -> Iterator[tuple[str, Self]]:
        """Yield settings that may need less memory, each with its run, cheapest first."""


def host_refusal(run: HostRun[Any], available: int, setting: str) -> str:
    """Return why a run does not fit into a host's memory, in one sentence with settings that would fit.

    Args:
        run: the run.
        available: available bytes.
        setting: verb phrase for `available`, such as "has" or "has free".

    Returns:
        An empty string if the run fits.
    """
    needed = run.expected()
    if needed.total <= available:
        return ""
    return (
        f"the trainer's {run.ranks} rank(s) on a host are expected to take {needed} of its memory, and "
        f"this host {setting} {available / GIB:.1f} GiB; {_remedy(run, available)}"
    )


def host_alternatives(run: HostRun[Any], available: int) -> Iterator[tuple[str, HostRun[Any]]]:
    """Yield settings that fit, cheapest first, and finally the smallest number of hosts that fits."""
    for name, changed in run.alternatives():
        if changed != run and changed.expected().total <= available:
            yield name, changed
    ranks = run.ranks * run.hosts
    for hosts in range(run.hosts + 1, ranks + 1):
        spread = dataclasses.replace(run, hosts=hosts)
        if ranks % hosts == 0 and spread.expected().total <= available:
            yield f"cluster.nodes = {hosts}", spread
            return


def transfer_bytes(stepped: int, largest: int, item: int) -> int:
    """Return the bytes of gradients and parameters in transfer between a device and its host.

    Args:
        stepped: number of elements that the rank's optimizer updates.
        largest: number of elements of the rank's largest parameter.
        item: bytes of an element's gradient plus its parameter.
    """
    return BUFFERS * min(stepped, max(CHUNK_ELEMENTS, largest)) * item


def _remedy(run: HostRun[Any], available: int) -> str:
    remedies = [_described(run, name, changed) for name, changed in host_alternatives(run, available)]
    if not remedies:
        return (
            "no setting of its ranks would fit: spread them over more hosts ([parallel], cluster.nodes), or "
            "train adapters (lora.rank)"
        )
    return f"it would fit with {', or with '.join(remedies)}"


def _described(run: HostRun[Any], name: str, changed: HostRun[Any]) -> str:
    size = f"{changed.expected().total / GIB:.1f} GiB"
    if changed.work.optimizer == run.work.optimizer:
        return f"{name} ({size})"
    peak_gib = changed.work.expected(1024).peak / GIB
    return f"{name} ({size}, and at least {peak_gib:.1f} GiB of each GPU)"
