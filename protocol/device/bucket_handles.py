"""Shares memory buckets with processes on the same host, by handles of JSON values.

GPU memory is shared by CUDA IPC handles. Host memory is an anonymous file, opened through its owner's open
descriptor. The file disappears when the owner ends; a process that has mapped it keeps the memory.
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
"""`place` of buckets in host memory."""


class GpuBuckets:
    """Factory of shared buckets on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.place = gpu_of(device)
        """UUID of the GPU."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return a new bucket, uint8 of at least one byte. Raises WeightError or OutOfMemoryError."""
        return torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)

    def handle(self, bucket: torch.Tensor) -> list[Any]:
        """Return the argument of `open_bucket`; the bucket must live while others may open it."""
        # (device, handle, bytes, offset, reference counter, offset of the counter, event, wait for the event)
        shared = bucket.untyped_storage()._share_cuda_()
        return [base64.b64encode(part).decode() if isinstance(part, bytes) else part for part in shared]

    def close(self) -> None:
        """Stop sharing; existing mappings stay valid. Idempotent. The last bucket frees the memory."""


class HostBuckets:
    """Factory of shared buckets in host memory, with the interface of `GpuBuckets`."""

    device = torch.device("cpu")
    place = HOST

    def __init__(self) -> None:
        self._files: dict[int, HostMemory] = {}
        """Address of a bucket -> anonymous file."""

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
    """Return the boot id of the host's kernel, which containers share, and the host name."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), socket.gethostname()


def open_bucket(place: str, handle: list[Any]) -> torch.Tensor:
    """Map a bucket of another process, uint8.

    GPU memory is mapped on this process's GPU, regardless of the GPU that holds it.

    Args:
        place: `place` of the owner's buckets.

    Raises:
        OSError, RuntimeError, TypeError, ValueError: the bucket cannot be mapped, or its owner has ended.
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
    """Return the factory of buckets on a device."""
    return GpuBuckets(device) if device.type == "cuda" else HostBuckets()
