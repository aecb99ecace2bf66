"""Builds the command lines that start one process per rank, and runs a command line for its result."""

import json
import os
import subprocess
import sys
from typing import Any

from protocol.errors import TetherError
from trainer.hosts.place import HostPlace

NO_LOGS = ("--log-dir", os.devnull)
"""Options that keep torchrun from creating log directories, which it never removes; ranks inherit its output.
"""


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Variable that torchrun would set for several ranks, with a banner. Ranks set their threads by
`trainer.threads`."""


def torchrun(ranks: int, module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module on `ranks` ranks of this machine."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *NO_LOGS]
    return [sys.executable, "-m", *launcher, "-m", module, *arguments]


def result_of_ranks(ranks: int, module: str, *arguments: str, limit_s: float | None = None) -> dict[str, Any]:
    """Run a module by `torchrun`, and return the last JSON object that rank 0 printed.

    Args:
        limit_s: timeout, seconds; None: no timeout.

    Raises:
        TetherError: a rank failed, or the timeout has passed.
    """
    command = torchrun(ranks, module, *arguments)
    try:
        done = subprocess.run(
            command,
            env=ONE_THREAD | os.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        raise TetherError(f"the ranks have not finished within {limit_s} s") from None
    if done.returncode:
        raise TetherError(f"the ranks failed with exit code {done.returncode}; see their output above")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]  # libraries may print, too
    facts: dict[str, Any] = json.loads(lines[-1])
    return facts


def torchrun_on_hosts(ranks: int, place: HostPlace, port: int, module: str) -> list[str]:
    """Return the command line that runs a module on each of this host's ranks.

    torchrun does not restart ranks: hosts end and start together.

    Args:
        ranks: number of ranks on each host.
        port: free port of host 0, where torchrun on all hosts and the ranks meet; used once.
    """
    launcher = [
        "torch.distributed.run",
        *("--nnodes", str(place.hosts), "--node-rank", str(place.number), "--nproc-per-node", str(ranks)),
        *("--master-addr", place.address, "--master-port", str(port), "--max-restarts", "0"),
        *NO_LOGS,
    ]
    return [sys.executable, "-m", *launcher, "-m", module]
