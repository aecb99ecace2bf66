"""Memory of one process that others on its host can map, described in a file: the transport `shared`.

    FILE.msgpack    a `Description`: whose memory, and which tensors lie where in it

On a CPU an anonymous file is mapped, named by the open descriptor of its owner: nothing is left behind
however that ends, and who has mapped it keeps it. On a GPU it is CUDA's own handles. Owner and reader see the
same process ids.
"""

import fcntl
import itertools
import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from protocol.errors import WeightError
from protocol.weights.buckets import ALIGNMENT, DTYPE_BYTES

Sections = Mapping[str, Mapping[str, torch.Tensor]]
"""What the tensors are -> name -> tensor."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process, not another one that came later under its number."""

    pid: int
    started: int
    """Clock ticks since boot."""

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """Raises OSError if there is no such process."""
        return cls(pid, int(_stat(pid)[19]))

    def is_alive(self) -> bool:
        """Whether it has its memory still: a zombie has none."""
        try:
            found = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return int(found[19]) == self.started and found[0] not in "ZX"


class HostMemory(msgspec.Struct, frozen=True, tag="host"):
    """An anonymous file."""

    descriptor: int
    """In its owner."""
    inode: int
    """So that a descriptor that came later under the same number is not taken for it."""
    nbytes: int


class DeviceMemory(msgspec.Struct, frozen=True, tag="device"):
    """A storage on a GPU: what `UntypedStorage._share_cuda_` says of it."""

    gpu: str
    """UUID."""
    handle: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes


class View(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in one of the memories."""

    memory: int
    """Index into the description's."""
    offset: int
    """Bytes."""
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Description(msgspec.Struct, frozen=True):
    """The whole file."""

    owner: ProcessIdentity
    memories: tuple[HostMemory | DeviceMemory, ...]
    sections: dict[str, dict[str, View]]


class SharedTensors:
    """Tensors of this process in memory that others can map: those of a CPU are copied there, those of a GPU
    stay where they are."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """`tensors` in the order of `SharedTensors.tensors`; those that are one in memory are one there, too.

        Raises:
            WeightError: there is no room for copies.
        """
        held: dict[tuple[object, ...], int] = {}
        sizes: list[int] = []
        for tensor in tensors:
            if not tensor.is_cuda and held.setdefault(_identity(tensor), len(sizes)) == len(sizes):
                sizes.append(_extent(tensor))
        starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        self._file = os.memfd_create("tether-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._memory = _reserved(self._file, max(starts[-1], 1))
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self.tensors = [
            t.detach() if t.is_cuda else self._copied(t, starts[held[_identity(t)]]) for t in tensors
        ]

    def write(self, path: Path, sections: Sections) -> None:
        """Describe tensors, each of which lies in the room, in a file that only this user reads; those of
        dead processes beside it go.

        Raises:
            WeightError: the file cannot be written, or memory of the GPU cannot be shared.
        """
        try:
            description = self._described(sections)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_dead(path.parent)
            aside = path.with_suffix(f".{os.getpid()}.tmp")
            aside.unlink(missing_ok=True)
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.msgpack.encode(description))
            aside.rename(path)
        except (OSError, RuntimeError) as error:
            raise WeightError(f"{path}: {error}") from error

    def close(self) -> None:
        """Nobody can map it from now on; who has keeps it, and so do the tensors here. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _described(self, sections: Sections) -> Description:
        memories: list[HostMemory | DeviceMemory] = [
            HostMemory(self._file, os.fstat(self._file).st_ino, os.fstat(self._file).st_size)
        ]
        shared: dict[int, int] = {}
        views = {
            section: {name: self._view(tensor, memories, shared) for name, tensor in named.items()}
            for section, named in sections.items()
        }
        return Description(ProcessIdentity.of(os.getpid()), tuple(memories), views)

    def _copied(self, tensor: torch.Tensor, start: int) -> torch.Tensor:
        target = torch.empty(0, dtype=tensor.dtype)
        if tensor.numel():  # each has a storage of its own
            target = torch.frombuffer(
                self._memory, dtype=tensor.dtype, offset=start, count=_extent(tensor) // tensor.element_size()
            )
        target = target.as_strided(tensor.shape, tensor.stride())
        return target.copy_(tensor.detach())

    def _view(
        self, tensor: torch.Tensor, memories: list[HostMemory | DeviceMemory], shared: dict[int, int]
    ) -> View:
        memory, offset = 0, tensor.data_ptr() - self._base if tensor.numel() else 0
        if tensor.is_cuda:
            storage = tensor.untyped_storage()
            if storage._cdata not in shared:
                shared[storage._cdata] = len(memories)
                _, handle, nbytes, start, counter, counter_offset, event, _ = storage._share_cuda_()
                memories.append(
                    DeviceMemory(gpu_of(tensor.device), handle, nbytes, start, counter, counter_offset, event)
                )
            memory, offset = shared[storage._cdata], int(tensor.storage_offset()) * tensor.element_size()
        return View(
            memory,
            offset,
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tuple(tensor.stride()),
        )


def map_tensors(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors that a file describes, in the memory of their owner; on a CPU what is written to them here
    stays here.

    Raises:
        WeightError: the file is not one of ours, or its owner has ended.
    """
    try:
        found = _read(path)
        storages = [
            _map_host(found.owner.pid, memory) if isinstance(memory, HostMemory) else _map_device(memory)
            for memory in found.memories
        ]
        return {
            section: {name: _on(storages, view) for name, view in named.items()}
            for section, named in found.sections.items()
        }
    except FileNotFoundError as error:
        raise WeightError(f"{path}: the process whose tensors it describes has ended") from error
    except (OSError, RuntimeError, ValueError, IndexError) as error:
        raise WeightError(f"{path} does not describe tensors that can be mapped: {error}") from error


def owner_of(path: Path) -> ProcessIdentity:
    """Whose memory a file describes.

    Raises:
        WeightError: the file is not there, or not one of ours.
    """
    try:
        return _read(path).owner
    except (OSError, msgspec.DecodeError) as error:
        raise WeightError(f"{path} does not say whose memory it describes: {error}") from error


def gpu_of(device: torch.device) -> str:
    """UUID of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _read(path: Path) -> Description:
    return msgspec.msgpack.decode(path.read_bytes(), type=Description)


def _map_host(pid: int, memory: HostMemory) -> torch.UntypedStorage:
    descriptor = os.open(f"/proc/{pid}/fd/{memory.descriptor}", os.O_RDONLY)
    try:
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_size) != (memory.inode, memory.nbytes):
            raise FileNotFoundError("another file has its descriptor")
        # Privately: what the owner writes is seen, as long as nothing is written here.
        storage: torch.UntypedStorage = torch.UntypedStorage.from_file(
            f"/proc/self/fd/{descriptor}", False, memory.nbytes
        )  # type: ignore[assignment]
        return storage
    finally:
        os.close(descriptor)


def _map_device(memory: DeviceMemory) -> torch.UntypedStorage:
    here = gpu_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else "none"
    if here != memory.gpu:
        raise ValueError(f"it is memory of GPU {memory.gpu}, this process uses {here}")
    return torch.UntypedStorage._new_shared_cuda(
        torch.cuda.current_device(),
        memory.handle,
        memory.nbytes,
        memory.offset,
        memory.counter,
        memory.counter_offset,
        memory.event,
        False,
    )


def _on(storages: Sequence[torch.UntypedStorage], view: View) -> torch.Tensor:
    if view.dtype not in DTYPE_BYTES or view.offset % DTYPE_BYTES[view.dtype]:
        raise ValueError(f"no tensor of dtype {view.dtype} lies at byte {view.offset}")
    storage = storages[view.memory]
    empty = torch.empty(0, dtype=getattr(torch, view.dtype), device=storage.device)
    tensor = empty.set_(storage, view.offset // DTYPE_BYTES[view.dtype], view.shape, view.stride)
    if tensor.numel() and view.offset + _extent(tensor) > storage.nbytes():
        raise ValueError(f"a tensor of {list(view.shape)} leaves its memory")
    return tensor


def _reserved(file: int, nbytes: int) -> mmap.mmap:
    """The pages of an anonymous file, all of them there: touching one that cannot be had would be a
    SIGBUS."""
    try:
        os.posix_fallocate(file, 0, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return mmap.mmap(file, nbytes)
    except OSError as error:
        os.close(file)
        raise WeightError(f"{-(-nbytes // 2**20)} MiB of memory to share: {error}") from error


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.data_ptr() if tensor.numel() else id(tensor),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
    )


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from its first element to its last."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + steps) * tensor.element_size() if tensor.numel() else 0


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _remove_dead(directory: Path) -> None:
    for path in directory.iterdir():
        with suppress(OSError, ValueError, LookupError):
            aside = path.suffix == ".tmp"  # of a process that died while it wrote: its number is in the name
            if not (
                Path(f"/proc/{int(path.suffixes[-2][1:])}").exists()
                if aside
                else _read(path).owner.is_alive()
            ):
                path.unlink()
