"""Shares buckets of memory with processes of the same host, by handles that are plain values for JSON.

GPU memory is shared by CUDA IPC handles. Host memory is an anonymous file, found through its owner's open
descriptor: it disappears when the owner ends, and a process that has mapped it keeps it.
"""

import base64
import os
import socket
from functools import cache
from pathlib import Path
from typing import Any

import torch

from protocol.device.shared_tensors import HostMemory, gpu_of, map_host, reserved

HOST = "host"
"""Place of buckets in host memory."""


class GpuBuckets:
    """Buckets on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.place = gpu_of(device)
        """UUID of the GPU."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return a new bucket, uint8 of at least one byte. Raises WeightError or OutOfMemoryError."""
        return torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)

    def handle(self, bucket: torch.Tensor) -> list[Any]:
        """Return what `open_bucket` takes; the bucket must live as long as others may open it."""
        # (device, handle, bytes, offset, reference counter, its offset, event, whether to wait for it)
        shared = bucket.untyped_storage()._share_cuda_()
        return [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in shared]

    def close(self) -> None:
        """Stop sharing; mappings that exist stay valid. Idempotent. The memory ends with its last bucket."""


class HostBuckets:
    """Buckets in host memory; the interface is `GpuBuckets`'."""

    device = torch.device("cpu")
    place = HOST

    def __init__(self) -> None:
        self._files: dict[int, HostMemory] = {}
        """Address of a bucket -> its file."""

    def empty(self, nbytes: int) -> torch.Tensor:
        file = os.memfd_create("tether-bucket", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        bucket = torch.frombuffer(reserved(file, max(nbytes, 1)), dtype=torch.uint8)
        found = os.fstat(file)
        self._files[bucket.data_ptr()] = HostMemory(file, found.st_ino, found.st_size)
        return bucket

    def handle(self, bucket: torch.Tensor) -> list[Any]:
        file = self._files[bucket.data_ptr()]
        return [os.getpid(), file.descriptor, file.inode, file.nbytes]

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1].descriptor)


SharedBuckets = GpuBuckets | HostBuckets


@cache
def machine() -> tuple[str, str]:
    """Return the boot of this host's kernel, which its containers share, and the host's name."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), socket.gethostname()


def open_bucket(place: str, handle: list[Any]) -> torch.Tensor:
    """Map a bucket of another process, uint8.

    GPU memory is mapped on this process's GPU, whichever GPU it is on.

    Args:
        place: `SharedBuckets.place` of its owner.
        handle: the result of the owner's `handle`.

    Raises:
        OSError, RuntimeError, TypeError, ValueError: it cannot be mapped, or its owner has ended.
    """
    if place == HOST:
        pid, *facts = map(int, handle)
        return torch.empty(0, dtype=torch.uint8).set_(map_host(pid, HostMemory(*facts)))
    _, *parts = handle
    # A published version is complete, so there is no event to wait for.
    *found, _ = (base64.b64decode(part) if isinstance(part, str) else part for part in parts)
    storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *found, False)
    return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)


def buckets_on(device: torch.device) -> SharedBuckets:
    """Return what makes buckets on a device."""
    return GpuBuckets(device) if device.type == "cuda" else HostBuckets()
