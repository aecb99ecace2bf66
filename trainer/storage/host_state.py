"""Copies a rank's device state to the host, where a thread writes it while the next step runs."""

import logging
import mmap
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from protocol.host.atomic_file import sync

log = logging.getLogger("tether.trainer")


@dataclass(frozen=True, slots=True)
class HostState:
    """A rank's part of a checkpoint, in host memory."""

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    """Name of a safetensors file -> its tensors, contiguous and none a view of another."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What each of these files says of itself."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Name of a text file -> its content."""
    parts: Mapping[str, "HostState"] = field(default_factory=dict)
    """Name of a directory -> what other models have in it."""

    def write(self, directory: Path) -> None:
        """Write the files into an existing directory, and sync them to the disk.

        Raises:
            OSError: one cannot be written; names it.
        """
        for name, text in self.texts.items():
            (directory / name).write_text(text)
            sync(directory / name)
        for name, tensors in self.tensors.items():
            path = directory / name
            try:
                save_file(dict(tensors), path, metadata=dict(self.metadata) or None)
            except Exception as error:  # safetensors' own, which says no path
                raise OSError(f"{path}: {error}") from error
            sync(path)
        for name, part in self.parts.items():
            (directory / name).mkdir(exist_ok=True)
            part.write(directory / name)
            sync(directory / name)


class HostCopies:
    """Copies of tensors in host memory, valid until the next copies are made.

    Copies of a GPU's tensors lie in page-locked memory, which is kept for the next time: page-locking takes
    longer than copying. Copies of a CPU's tensors are new each time, and are freed with their last user.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def copy_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return contiguous copies, complete on return, by the names of the tensors."""
        copies = {name: self._copy(name, tensor.detach()) for name, tensor in tensors}
        if self._kept:
            torch.cuda.current_stream().synchronize()
        return copies

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cuda:
            return tensor.clone(memory_format=torch.contiguous_format)
        memory = self._kept.get(name)
        if memory is None or len(memory) != tensor.nbytes:
            memory = self._kept[name] = page_locked(tensor.nbytes)
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)


def page_locked(nbytes: int) -> torch.Tensor:
    """Allocate memory that a GPU copies to on its own; torch's allocator would round the size up to 2^n."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    failed = int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0))
    if failed:
        log.warning("checkpoint.not_page_locked bytes=%d cuda_error=%d", nbytes, failed)
    else:
        weakref.finalize(pages, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory
