"""Starts the ranks of a layout as processes, with a deadline."""

import os
import subprocess
import sys
import time
from pathlib import Path

from torch.distributed import TCPStore

ROOT = Path(__file__).parents[3]
DEADLINE_S = 800
"""Ranks import torch, all at once; on a machine with other work that alone takes a minute or two. Below the
limit of one test."""


def launch(ranks: int, module: str, *arguments: str, logs: Path, deadline_s: float = DEADLINE_S) -> None:
    """Run `python -m module arguments` on every rank as torchrun would; fails with the logs if a rank fails
    or the deadline passes."""
    # The store lives here, on a port that the system chose: no rank can lose a race for it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
    }
    logs.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(ranks):
        environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (logs / f"rank{rank}.log").open("w") as log:
            command = [sys.executable, "-m", module, *arguments]
            processes.append(
                subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        end = time.monotonic() + deadline_s
        for process in processes:
            process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        text = "\n".join(
            f"--- rank {rank}: {code}\n{(logs / f'rank{rank}.log').read_text()[-3000:]}"
            for rank, code in enumerate(codes)
        )
        raise AssertionError(f"{module} {arguments} (None is the deadline of {deadline_s} s)\n{text}")
    if None in codes:
        raise AssertionError(f"{module} {arguments}: deadline of {deadline_s} s: {codes}")
