"""A process group of two, made by hand as everybody does who broadcasts weights: rank 0 sends, rank 1
receives."""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.gpu.shapes import group_backend

HOST = "127.0.0.1"
TIMEOUT = timedelta(seconds=60)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


def join_pair(port: int, rank: int) -> Any:
    """The group; rank 0 has the store. Blocks until the other one is there."""
    store = dist.TCPStore(HOST, port, 2, rank == 0, TIMEOUT, wait_for_workers=False)
    if group_backend() == "gloo":
        return dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def broadcast(group: Any, tensor: torch.Tensor) -> None:
    """From rank 0; on a GPU in the order of the current stream, without waiting on the host."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group.broadcast([tensor], options).wait()
