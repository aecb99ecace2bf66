"""What the machine can do: the same bytes by NCCL broadcast, by peer copy, and copied on one GPU.

    python -m tests.benchmarks.gpu.limits --model 7b

Prints lines of JSON as `session` does. Without a GPU it rehearses on gloo.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.benchmarks.gpu.groups import broadcast, free_port, join_pair
from tests.benchmarks.gpu.partner import ROOT
from tests.benchmarks.gpu.session import say
from tests.benchmarks.gpu.shapes import SIZES, device, settle, shapes_of

BUCKETS_MB = (64, 256, 512)
ROUNDS = 5


def median_ms(once: Callable[[], object]) -> float:
    """Return the median time of a few rounds, in ms, after one that is not counted."""
    found = []
    for _ in range(ROUNDS + 1):
        settle()
        began = time.perf_counter()
        once()
        settle()
        found.append((time.perf_counter() - began) * 1e3)
    return sorted(found[1:])[ROUNDS // 2]


def weights(model: str, where: torch.device) -> list[torch.Tensor]:
    """Tensors with the shapes of a model."""
    dtype = getattr(torch, SIZES[model].dtype)
    return [torch.zeros(shape, dtype=dtype, device=where) for shape in shapes_of(model)]


def on_one_gpu(model: str) -> dict[str, float]:
    """Copies that need no second process: on a GPU, to a peer, to and from the host."""
    source = weights(model, device())
    target = [torch.empty_like(tensor) for tensor in source]
    found = {"copy on one GPU": median_ms(partial(torch._foreach_copy_, target, source))}
    del target
    if torch.cuda.device_count() > 1:
        peer = weights(model, torch.device("cuda", 1))
        settle()
        found["copy to a peer"] = median_ms(partial(copy_each, peer, source, torch.device("cuda", 1)))
        del peer
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(1 << 30, dtype=torch.uint8, device=device())
        gigabytes = sum(tensor.nbytes for tensor in source) / (1 << 30)
        found["to pinned host memory"] = gigabytes * median_ms(lambda: host.copy_(there, non_blocking=True))
        found["from pinned host memory"] = gigabytes * median_ms(lambda: there.copy_(host, non_blocking=True))
    return found


def copy_each(target: list[torch.Tensor], source: list[torch.Tensor], waits: torch.device) -> None:
    """Tensor by tensor across devices, and wait for both."""
    for there, here in zip(target, source, strict=True):
        there.copy_(here, non_blocking=True)
    torch.cuda.synchronize(waits)


def between_two(model: str, group: Any) -> dict[str, float]:
    """Broadcasts in buckets and tensor by tensor; both ranks call it."""
    tensors = weights(model, device())
    total = sum(tensor.nbytes for tensor in tensors)

    def in_buckets(bucket: torch.Tensor) -> None:
        for start in range(0, total, bucket.nbytes):
            broadcast(group, bucket[: min(bucket.nbytes, total - start)])

    found = {}
    for megabytes in BUCKETS_MB:
        bucket = torch.zeros(megabytes << 20, dtype=torch.uint8, device=device())
        found[f"broadcast, {megabytes} MiB buckets"] = median_ms(partial(in_buckets, bucket))
    found["broadcast, one call a tensor"] = median_ms(
        lambda: [broadcast(group, tensor) for tensor in tensors]
    )
    return found


def main() -> None:
    """Measure, with a second process of this module for the other GPU."""
    parser = argparse.ArgumentParser(description="Limits of moving weights on this machine.")
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--peer", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peer:
        if torch.cuda.is_available():
            torch.cuda.set_device(1)
        between_two(arguments.model, join_pair(arguments.peer, rank=1))
        return
    say("begin", part="limits")
    found = on_one_gpu(arguments.model)
    result: dict[str, Any] = {"ms": found, "machine": machine()}
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        say("end", part="limits", result=result)
        return
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.gpu.limits",
        "--model",
        arguments.model,
        "--peer",
        str(port),
    ]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ.copy()) as peer:
        try:
            found |= between_two(arguments.model, join_pair(port, rank=0))
            peer.wait(30)
        finally:
            peer.kill()
    say("end", part="limits", result=result)


def machine() -> dict[str, Any]:
    """GPUs and the libraries that drive them."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": []}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found["gpus"].append(f"{properties.name}, {properties.total_memory >> 30} GiB")
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


if __name__ == "__main__":
    main()
