"""A process group of two, the sender of weights and one receiver: how both of them make it."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from protocol.weights.buckets import ALONE_BYTES, ALONE_ON_GPU_BYTES

QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # 0: an error of this group does not end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does a watchdog of torch's that is held up
}

_lock = threading.Lock()


@contextmanager
def unwatched() -> Iterator[None]:
    """Within this, groups are made that have no watchdog: whoever makes them bounds every wait. Other groups
    keep theirs."""
    with _lock:
        before = {name: os.environ.get(name) for name in QUIET}
        os.environ.update(QUIET)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


SENDER, RECEIVER = 0, 1
"""Ranks."""
ALONE = {"gloo": ALONE_BYTES, "nccl": ALONE_ON_GPU_BYTES}
"""Backend -> from how many bytes on a tensor is a piece."""


def make_pair(
    store: Any, rank: int, device: torch.device, seconds: float, hold: Callable[[Any], None]
) -> Any:
    """A group on gloo (CPU) or NCCL whose two members have heard of each other: rank 0 has broadcast a byte.

    It may block for ever, on a GPU, if the other one stands still: `make_group` bounds it, and aborts what
    `hold` was given.
    """
    group: Any
    if device.type == "cpu":
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=seconds))
        hold(group)
        group.broadcast([torch.zeros(1, dtype=torch.uint8)]).wait()
        return group
    torch.cuda.set_device(device)
    with unwatched():
        group = dist.ProcessGroupNCCL(store, rank, 2, dist.ProcessGroupNCCL.Options())
    hold(group)
    stream = torch.cuda.Stream(device)  # not the one that trains
    with torch.cuda.stream(stream):  # the communicator is made by the first collective
        group.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)]).wait()
        stream.synchronize()
    return group


def abort(group: Any) -> None:
    """End a group and whatever is stuck in it."""
    with suppress(RuntimeError, AttributeError):
        group.abort()
