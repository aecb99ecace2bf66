"""Copies a rank's device state to host memory, from which a thread writes it during the next step."""

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
    """A rank's shard of a checkpoint, in host memory."""

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    """Name of a safetensors file -> its tensors, contiguous and without shared memory."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of each safetensors file."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Name of a text file -> its content."""
    parts: Mapping[str, "HostState"] = field(default_factory=dict)
    """Name of a subdirectory -> state of another model."""

    def write(self, directory: Path) -> None:
        """Write the files into an existing directory, and sync them to disk.

        Raises:
            OSError: a file cannot be written; the message names the file.
        """
        for name, text in self.texts.items():
            (directory / name).write_text(text)
            sync(directory / name)
        for name, tensors in self.tensors.items():
            path = directory / name
            try:
                save_file(dict(tensors), path, metadata=dict(self.metadata) or None)
            except Exception as error:  # safetensors' own error, without the path
                raise OSError(f"{path}: {error}") from error
            sync(path)
        for name, part in self.parts.items():
            (directory / name).mkdir(exist_ok=True)
            part.write(directory / name)
            sync(directory / name)


class HostCopies:
    """Copies of tensors in host memory, valid until the next copies are made.

    Copies of GPU tensors are in page-locked memory, which is reused because page-locking takes longer than
    copying. Copies of CPU tensors are allocated each time, and freed with their last user.
    """

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def copy_all(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return contiguous copies by tensor name, complete on return."""
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
    """Allocate page-locked memory for a GPU; torch's allocator would round the size up to 2^n."""
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
