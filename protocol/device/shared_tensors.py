"""Shares tensors of a process with other processes on its host, which map them (transport `shared`).

    FILE.msgpack    a `Description`: the owner, its memories, and the tensors in them

Host memory is an anonymous file (memfd), opened through the owner's open descriptor. The file disappears when
the owner ends, even by a crash; a process that has mapped it keeps the memory. GPU memory is shared by CUDA
IPC handles. Owner and readers must be in the same pid namespace.
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
from protocol.host.atomic_file import write_atomically
from protocol.host.prctl import open_to_own_user
from protocol.weights.buckets import ALIGNMENT, DTYPE_BYTES

Sections = Mapping[str, Mapping[str, torch.Tensor]]
"""Section -> name -> tensor."""


class ProcessIdentity(msgspec.Struct, frozen=True):
    """Identity of a process, which differs from later processes with the same pid."""

    pid: int
    started: int
    """Start time, clock ticks since boot."""

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity":
        """Return the identity of a running process. Raises OSError if no process has this pid."""
        return cls(pid, int(_stat(pid)[19]))

    def is_alive(self) -> bool:
        """Return whether the process runs; a zombie has no memory and counts as dead."""
        try:
            found = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return False
        return int(found[19]) == self.started and found[0] not in "ZX"


class HostMemory(msgspec.Struct, frozen=True, tag="host"):
    """Anonymous file in host memory."""

    descriptor: int
    """File descriptor in the owner."""
    inode: int
    """Inode of the file, by which a reader detects that the descriptor was reused."""
    nbytes: int


class DeviceMemory(msgspec.Struct, frozen=True, tag="device"):
    """Storage on a GPU, with the fields of `UntypedStorage._share_cuda_`."""

    gpu: str
    """UUID of the GPU."""
    handle: bytes
    nbytes: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes


class View(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in one of the memories."""

    memory: int
    """Index into `Description.memories`."""
    offset: int
    """Bytes from the start of the memory."""
    dtype: str
    """torch dtype without the prefix "torch."."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Description(msgspec.Struct, frozen=True):
    """Content of the description file."""

    owner: ProcessIdentity
    memories: tuple[HostMemory | DeviceMemory, ...]
    sections: dict[str, dict[str, View]]
    """Section -> name -> tensor."""


class SharedTensors:
    """Tensors of this process that other processes can map.

    Host tensors are copied to shareable memory; GPU tensors are shared in place. `tensors` holds them in the
    order of the constructor's argument.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the host tensors to shareable memory; tied tensors share their copy.

        Raises:
            WeightError: the memory does not suffice for the copies.
        """
        held: dict[tuple[object, ...], int] = {}
        sizes: list[int] = []
        for tensor in tensors:
            if not tensor.is_cuda and held.setdefault(_identity(tensor), len(sizes)) == len(sizes):
                sizes.append(_extent(tensor))
        starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        self._file = os.memfd_create("tether-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._memory = reserved(self._file, max(starts[-1], 1))
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self.tensors = [
            t.detach() if t.is_cuda else self._copied(t, starts[held[_identity(t)]]) for t in tensors
        ]

    def write(self, path: Path, sections: Sections) -> None:
        """Write the description file, for this user only, and remove dead processes' files next to it.

        Args:
            path: path of the description file.
            sections: tensors to describe, each an element of `tensors` or a view of one.

        Raises:
            WeightError: the file cannot be written, or GPU memory cannot be shared.
        """
        try:
            if any(not tensor.is_cuda for tensor in self.tensors):
                open_to_own_user()  # other processes map the file through /proc
            description = self._described(sections)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_dead(path.parent)
            aside = path.with_suffix(f".{os.getpid()}.tmp")  # `_remove_dead` reads this pid
            data = msgspec.msgpack.encode(description)
            write_atomically(path, data, mode=0o600, durable=False, aside=aside)
        except (OSError, RuntimeError) as error:
            raise WeightError(f"{path}: {error}") from error

    def close(self) -> None:
        """Stop sharing the host tensors; existing mappings and `tensors` stay valid. Idempotent."""
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
        if tensor.numel():  # an empty tensor has a separate storage
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
    """Map the tensors that a file describes: section -> name -> tensor, in the owner's memory.

    The owner's writes are visible. Writes to host tensors stay private to this process.

    Raises:
        WeightError: the file is missing or malformed, or its owner has ended.
    """
    try:
        description = _read(path)
        storages = [
            map_host(description.owner.pid, memory) if isinstance(memory, HostMemory) else _map_device(memory)
            for memory in description.memories
        ]
        return {
            section: {name: _on(storages, view) for name, view in named.items()}
            for section, named in description.sections.items()
        }
    except FileNotFoundError as error:
        raise WeightError(f"{path}: the process whose tensors it describes has ended") from error
    except (OSError, RuntimeError, ValueError, IndexError) as error:
        raise WeightError(f"{path} does not describe tensors that can be mapped: {error}") from error


def owner_of(path: Path) -> ProcessIdentity:
    """Return the process whose tensors a file describes.

    Raises:
        WeightError: the file is missing or malformed.
    """
    try:
        return _read(path).owner
    except (OSError, msgspec.DecodeError) as error:
        raise WeightError(f"{path} does not describe the tensors of a process: {error}") from error


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def _read(path: Path) -> Description:
    return msgspec.msgpack.decode(path.read_bytes(), type=Description)


def map_host(pid: int, memory: HostMemory) -> torch.UntypedStorage:
    """Map an anonymous file of another process; this process's writes stay private.

    Raises:
        OSError: the file cannot be opened, or its owner has closed it.
    """
    descriptor = os.open(f"/proc/{pid}/fd/{memory.descriptor}", os.O_RDONLY)
    try:
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_size) != (memory.inode, memory.nbytes):
            raise FileNotFoundError("the owner has reused the descriptor for another file")
        # A private mapping shows the owner's writes until this process writes to the page.
        storage: torch.UntypedStorage = torch.UntypedStorage.from_file(
            f"/proc/self/fd/{descriptor}", False, memory.nbytes
        )  # type: ignore[assignment]
        return storage
    finally:
        os.close(descriptor)


def _map_device(memory: DeviceMemory) -> torch.UntypedStorage:
    here = gpu_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else "none"
    if here != memory.gpu:
        raise ValueError(f"the memory is on GPU {memory.gpu}, this process uses {here}")
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
        raise ValueError(f"no tensor of dtype {view.dtype} can begin at byte {view.offset}")
    storage = storages[view.memory]
    empty = torch.empty(0, dtype=getattr(torch, view.dtype), device=storage.device)
    tensor = empty.set_(storage, view.offset // DTYPE_BYTES[view.dtype], view.shape, view.stride)
    if tensor.numel() and view.offset + _extent(tensor) > storage.nbytes():
        raise ValueError(f"a tensor of shape {list(view.shape)} exceeds its memory")
    return tensor


def reserved(file: int, nbytes: int) -> mmap.mmap:
    """Allocate and map all pages of an anonymous file.

    Without the allocation, touching a page for which there is no memory would raise SIGBUS.

    Raises:
        WeightError: the memory does not suffice; the file is closed.
    """
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
    """Return the bytes from the tensor's first element to the end of its last element."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + steps) * tensor.element_size() if tensor.numel() else 0


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, starting with the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _remove_dead(directory: Path) -> None:
    for path in directory.iterdir():
        with suppress(OSError, ValueError, LookupError):
            if path.suffix == ".tmp":  # in progress, or left by a process that died while writing
                alive = Path(f"/proc/{int(path.suffixes[-2][1:])}").exists()
            else:
                alive = _read(path).owner.is_alive()
            if not alive:
                path.unlink()
