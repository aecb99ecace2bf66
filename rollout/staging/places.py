"""Selects where an engine stages versions: on its device, in host memory, or in the version's files.

| place    | extra memory                                           | pause of a commit                     |
|----------|--------------------------------------------------------|---------------------------------------|
| `device` | a copy on the device                                   | a copy within device memory           |
| `host`   | a copy in host memory, pinned with CUDA                | a copy from host to device            |
| `layers` | the largest tensor: once on the device, twice on a host| reading and digesting the whole version|

`layers` requires a transport that keeps the version until the commit. Engines do not know their transport, so
the rollout service passes `copy` instead of `auto` if versions are sent only once.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import psutil  # type: ignore[import-untyped]
import torch

from protocol.errors import EngineError, EngineSettingsError
from protocol.weights.buckets import ALIGNMENT

log = logging.getLogger("tether.rollout")

MIB = 1 << 20
RECEIVING_BYTES = 512 * MIB
"""GPU memory for receiving a version in addition to the staging copy: buckets in flight or not yet hashed."""
SLAB_BYTES = 8 << 30
"""Maximum pinned memory per allocation, unless a tensor is larger."""
BUFFERS = 2
"""Host buffers for applying a version in pieces: one is read while the other is filled."""


class StagingPlace(StrEnum):
    """Memory for staging versions; `AUTO` and `COPY` select the first of several that fits."""

    DEVICE = "device"
    HOST = "host"
    LAYERS = "layers"
    AUTO = "auto"
    COPY = "copy"


CANDIDATES = {
    StagingPlace.AUTO: (StagingPlace.DEVICE, StagingPlace.HOST, StagingPlace.LAYERS),
    StagingPlace.COPY: (StagingPlace.DEVICE, StagingPlace.HOST),
}
"""Places that `AUTO` and `COPY` try, in order."""


@dataclass(frozen=True, slots=True)
class StagingRoom:
    """Settings of an engine's staging copy."""

    place: str = StagingPlace.DEVICE
    """Value of `engine.staging`."""
    mb: int = 0
    """Value of `engine.staging_mb`, MiB; 0: no limit."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Memory required for staging, bytes."""

    device: int
    host: int


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free memory, bytes."""

    device: int
    host: int
    on_gpu: bool
    """False: the device is the host, and both numbers describe the same memory."""

    def can_hold(self, needs: MemoryNeeds) -> bool:
        """Return whether the required memory fits."""
        if self.on_gpu:
            return needs.device <= self.device and needs.host <= self.host
        return needs.device + needs.host <= self.host


def memory_needs(
    place: str, sizes: Sequence[int], largest: int, *, on_gpu: bool, shadow: int = 0
) -> MemoryNeeds:
    """Return the memory that a place requires.

    Args:
        place: neither `AUTO` nor `COPY`.
        sizes: size of each live parameter, bytes.
        largest: size of a version's largest tensor, bytes.
        on_gpu: whether the parameters are on a GPU.
        shadow: device memory for processing a layer, bytes; used by places with a copy.
    """
    receiving = (RECEIVING_BYTES if on_gpu else 0) + shadow
    parameters = sum(sizes)
    return {
        StagingPlace.DEVICE: MemoryNeeds(parameters + receiving, 0),
        StagingPlace.HOST: MemoryNeeds(receiving, sum(pack_slabs(sizes)[0]) if on_gpu else parameters),
        StagingPlace.LAYERS: MemoryNeeds(largest, BUFFERS * largest) if on_gpu else MemoryNeeds(0, largest),
    }[StagingPlace(place)]


def choose_place(
    room: StagingRoom, live: Iterable[torch.Tensor], largest: int, shadow: int = 0
) -> StagingPlace:
    """Return the place for staging these parameters, before any allocation.

    Args:
        room: staging settings.
        live: live parameters, all on one device.
        largest: size of a version's largest tensor, bytes.
        shadow: see `memory_needs`.

    Raises:
        EngineError: no place fits; the message contains the numbers and the relevant settings.
    """
    tensors = list(live)
    device = tensors[0].device if tensors else torch.device("cpu")
    sizes = [tensor.nbytes for tensor in tensors if tensor.numel()]
    return first_fitting_place(room, sizes, largest, _free_memory(device), str(device), shadow)


def first_fitting_place(
    room: StagingRoom, sizes: Sequence[int], largest: int, free: FreeMemory, device: str, shadow: int = 0
) -> StagingPlace:
    """Return the place for given memory numbers; see `choose_place`.

    Raises:
        EngineError: see `choose_place`.
    """
    wanted, parameters = StagingPlace(room.place), sum(sizes)
    for place in CANDIDATES.get(wanted, (wanted,)):
        needs = memory_needs(place, sizes, largest, on_gpu=free.on_gpu, shadow=shadow)
        limited = place != StagingPlace.LAYERS and 0 < room.mb * MIB < parameters
        if not limited and free.can_hold(needs):
            if wanted in CANDIDATES:
                log.info(
                    "engine.staging place=%s parameters_mib=%d free_device_mib=%d free_host_mib=%d",
                    place,
                    in_mib(parameters),
                    free.device // MIB,
                    free.host // MIB,
                )
            return place
    if limited:
        raise EngineSettingsError(
            f"engine.staging_mb is {room.mb}, a copy of the parameters takes {in_mib(parameters)} MiB: "
            "set it to that, or to 0"
        )
    smaller = "engine.memory_fraction" if free.on_gpu else "engine.kv_cache_mb"
    needed = f"{in_mib(needs.device + needs.host)} MiB"
    if free.on_gpu and needs.host:
        needed = f"{in_mib(needs.device)} MiB on the device and {in_mib(needs.host)} MiB in host memory"
    raise EngineError(
        f"staging needs {needed} in addition to the live parameters, {free.device // MIB} MiB are free "
        f"on {device}{f' and {free.host // MIB} MiB on the host' if free.on_gpu else ''}: lower {smaller}, "
        "spread the engine over more devices (engine.tensor_parallel_size), or stage in less memory "
        "(engine.staging)"
    )


def allocate_copies(place: StagingPlace, live: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Allocate memory for staged copies, with the layouts of the live parameters."""
    if place != StagingPlace.HOST:
        return {name: torch.empty_like(tensor) for name, tensor in live.items()}
    pinned = {name: tensor for name, tensor in live.items() if tensor.is_cuda and tensor.numel()}
    slabs, places = pack_slabs([tensor.nbytes for tensor in pinned.values()])
    memory = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy() for nbytes in slabs]
    copies = {name: torch.empty_like(live[name], device="cpu") for name in live.keys() - pinned.keys()}
    for (name, tensor), (slab, offset) in zip(pinned.items(), places, strict=True):
        raw = torch.frombuffer(memory[slab], dtype=torch.uint8, count=tensor.nbytes, offset=offset)
        stride = torch.empty_like(tensor, device="meta").stride()  # dense, even if the live tensor is padded
        copies[name] = raw.view(tensor.dtype).as_strided(tensor.shape, stride)
    return {name: copies[name] for name in live}


def pack_slabs(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Pack tensors into slabs of pinned memory.

    torch rounds each pinned tensor up to a power of two: a layer's experts of 768 MiB would take 1 GiB.

    Args:
        sizes: size of each tensor, bytes.

    Returns: size of each slab in bytes, a power of two; and (slab, offset) of each tensor.
    """
    slabs: list[int] = []
    used: list[int] = []
    places = [(0, 0)] * len(sizes)
    rounded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    left = sum(rounded)
    for index in sorted(range(len(sizes)), key=rounded.__getitem__, reverse=True):
        size = rounded[index]
        slab = next((i for i, end in enumerate(used) if end + size <= slabs[i]), len(slabs))
        if slab == len(slabs):
            slabs.append(max(1 << (size - 1).bit_length(), min(SLAB_BYTES, 1 << left.bit_length() - 1)))
            used.append(0)
        places[index] = slab, used[slab]
        used[slab] += size
        left -= size
    return slabs, places


def _free_memory(device: torch.device) -> FreeMemory:
    host = int(psutil.virtual_memory().available)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        host //= torch.distributed.get_world_size()  # shared by all ranks of a host
    if device.type != "cuda":
        return FreeMemory(host, host, on_gpu=False)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return FreeMemory(int(torch.cuda.mem_get_info(device)[0]) + cached, host, on_gpu=True)


def in_mib(nbytes: int) -> int:
    """Return MiB, rounded up."""
    return -(-nbytes // MIB)
