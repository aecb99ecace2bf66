"""Describes the memory of a host with the trainer's ranks, and says what would fit. No torch here."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from trainer.memory.expected import GIB, Planned

Work = TypeVar("Work", bound=Planned)
STATE_BYTES = 12
"""Master and moments of a parameter, float32."""
CHUNK_ELEMENTS = 1 << 26
"""Elements that the optimizer steps together, at least; as in `host_transfers.py`, which needs torch."""
ROOMS = 2
"""Chunks that have room in page-locked memory, in either direction."""


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
    """The tensors that the host's ranks export; all hosts have about as many."""

    @property
    def total(self) -> int:
        """Their sum: all are there while a checkpoint is written."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))

    def __str__(self) -> str:
        sizes = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in sizes if size)
        return f"{self.total / GIB:.1f} GiB ({parts})"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRun(ABC, Generic[Work]):
    """Facts that the memory of a host depends on; a backend computes it from them."""

    work: Work
    """The run."""
    hosts: int = 1
    """Hosts of the trainer; each has as many ranks."""
    on_gpu: bool = True
    """Whether ranks compute on GPUs; if not, all that they have is in host memory."""
    turns: bool = False
    """Whether the GPU's state moves to the host while engines have the GPU."""

    @property
    def ranks(self) -> int:
        """Ranks of one host."""
        return self.work.parallel.world_size // self.hosts

    @abstractmethod
    def expected(self) -> ExpectedHostMemory:
        """Return the memory of the host that takes the most."""

    @abstractmethod
    def alternatives(self) -> Iterator[tuple[str, Self]]:
        """Yield settings that may take less memory and the run with them, the cheapest first."""


def host_refusal(given: HostRun[Any], room: int, setting: str) -> str:
    """Return why a run does not fit the memory of a host, in one sentence with settings that would.

    Args:
        given: the run.
        room: bytes that there are.
        setting: how the room is called, such as "has" or "has free".

    Returns:
        An empty text if it fits.
    """
    needed = given.expected()
    if needed.total <= room:
        return ""
    return (
        f"the trainer's {given.ranks} rank(s) on a host are expected to take {needed} of its memory, and "
        f"this host {setting} {room / GIB:.1f} GiB; {_remedy(given, room)}"
    )


def host_alternatives(given: HostRun[Any], room: int) -> Iterator[tuple[str, HostRun[Any]]]:
    """Yield settings that fit, the cheapest first, and at last the fewest hosts that do."""
    for name, changed in given.alternatives():
        if changed != given and changed.expected().total <= room:
            yield name, changed
    ranks = given.ranks * given.hosts
    for hosts in range(given.hosts + 1, ranks + 1):
        more = dataclasses.replace(given, hosts=hosts)
        if ranks % hosts == 0 and more.expected().total <= room:
            yield f"cluster.nodes = {hosts}", more
            return


def transfer_bytes(stepped: int, largest: int, item: int) -> int:
    """Return the bytes of gradients and parameters on their way between a device and its host.

    Args:
        stepped: elements that the rank steps.
        largest: elements of its largest parameter.
        item: bytes of an element's gradient and of its parameter, together.
    """
    return ROOMS * min(stepped, max(CHUNK_ELEMENTS, largest)) * item


def _remedy(given: HostRun[Any], room: int) -> str:
    remedies = [_described(given, name, changed) for name, changed in host_alternatives(given, room)]
    if not remedies:
        return (
            "no setting of its ranks would fit: spread them over more hosts ([parallel], cluster.nodes), or "
            "train adapters (lora.rank)"
        )
    return f"it would fit with {', or with '.join(remedies)}"


def _described(given: HostRun[Any], name: str, changed: HostRun[Any]) -> str:
    size = f"{changed.expected().total / GIB:.1f} GiB"
    if changed.work.optimizer == given.work.optimizer:
        return f"{name} ({size})"
    least = changed.work.expected(1024).peak / GIB
    return f"{name} ({size}, and at least {least:.1f} GiB of each GPU)"
