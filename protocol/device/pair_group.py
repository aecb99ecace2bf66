"""Creates the process group of a weight transfer, with two ranks: the sender and one receiver."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from protocol.weights.buckets import ALONE_BYTES, ALONE_ON_GPU_BYTES

BACKENDS = ("gloo", "nccl")
"""Backends of such a group: gloo on CPUs, nccl on GPUs."""
SENDER, RECEIVER = 0, 1
"""Ranks."""
ALONE = {"gloo": ALONE_BYTES, "nccl": ALONE_ON_GPU_BYTES}
"""Backend -> `alone_bytes` of `protocol.weights.slices.BucketSizes`."""
NO_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # an error of the group does not end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does a watchdog thread that is delayed
}
"""Environment in which a group without a watchdog is created."""

_lock = threading.Lock()


def make_pair(
    store: Any, rank: int, device: torch.device, seconds: float, created: Callable[[Any], None]
) -> Any:
    """Return a group on gloo or NCCL whose ranks are connected: rank 0 has broadcast a byte.

    On a GPU it blocks without limit if the peer hangs, so it is called through `init_with_deadline`.

    Args:
        store: the store by which the ranks find each other.
        rank: `SENDER` or `RECEIVER`.
        device: the CPU, for gloo, or a GPU, for NCCL.
        seconds: timeout of gloo's operations.
        created: called with the group before anything blocks on it.
    """
    group: Any
    if device.type == "cpu":
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=seconds))
        created(group)
        group.broadcast([torch.zeros(1, dtype=torch.uint8)]).wait()
        return group
    torch.cuda.set_device(device)
    with _without_watchdog():
        group = dist.ProcessGroupNCCL(store, rank, 2, dist.ProcessGroupNCCL.Options())
    created(group)
    stream = torch.cuda.Stream(device)  # not the stream that trains
    with torch.cuda.stream(stream):  # NCCL creates the communicator in the first collective
        group.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)]).wait()
        stream.synchronize()
    return group


def abort(group: Any) -> None:
    """Abort a group, which ends the collectives that block in it."""
    with suppress(RuntimeError, AttributeError):
        group.abort()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Create groups without a watchdog within the block: their users bound every wait. Others keep theirs."""
    with _lock:
        before = {name: os.environ.get(name) for name in NO_WATCHDOG}
        os.environ.update(NO_WATCHDOG)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
