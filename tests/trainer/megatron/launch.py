"""Starts the ranks of a layout as processes, with a deadline."""

import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.distributed import TCPStore

DEADLINE_S = 800
"""On a machine with other work ranks take a minute or two. Below the limit of one test."""

FORKS = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
"""Ranks are copies of one process that has imported what they need, which takes longer than their work. With
a GPU they are not: the imports have used CUDA, which does not survive a fork."""
FORKS.set_forkserver_preload(["tests.trainer.megatron.ranks"])


def launch(ranks: int, module: str, *arguments: str, logs: Path, deadline_s: float = DEADLINE_S) -> None:
    """Run `python -m module arguments` on every rank as torchrun would; fails with the logs if a rank fails
    or the deadline passes."""
    # The store lives here, on a port that the system chose: no rank can lose a race for it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "LOCAL_WORLD_SIZE": str(ranks),
        "WORLD_SIZE": str(ranks),
    }
    logs.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(ranks):
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = FORKS.Process(
            target=be_rank, args=(module, arguments, environment, logs / f"rank{rank}.log")
        )
        process.start()
        processes.append(process)
    try:
        end = time.monotonic() + deadline_s
        for process in processes:
            process.join(max(0.1, end - time.monotonic()))
    finally:
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
            process.close()
    if any(codes):
        text = "\n".join(
            f"--- rank {rank}: {code}\n{(logs / f'rank{rank}.log').read_text()[-3000:]}"
            for rank, code in enumerate(codes)
        )
        raise AssertionError(f"{module} {arguments} (None is the deadline of {deadline_s} s)\n{text}")
    if None in codes:
        raise AssertionError(f"{module} {arguments}: deadline of {deadline_s} s: {codes}")


def be_rank(module: str, arguments: tuple[str, ...], environment: dict[str, str], log: Path) -> None:
    """Run a module in this process, with a log of its own."""
    os.environ.update(environment)
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
