"""Builds the command line that starts one process for each rank, and runs it for a result."""

import json
import os
import subprocess
import sys
from typing import Any

from protocol.errors import TetherError
from trainer.hosts.place import HostPlace

NO_LOGS = ("--log-dir", os.devnull)
"""Ranks write to where torchrun writes; otherwise it makes directories for them that it never removes."""


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Variable that torchrun sets itself for several ranks, with a banner of stars; ranks choose their threads by
`trainer.threads`."""


def torchrun(ranks: int, module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module once for each of `ranks` ranks, on this machine."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *NO_LOGS]
    return [sys.executable, "-m", *launcher, "-m", module, *arguments]


def result_of_ranks(ranks: int, module: str, *arguments: str, limit_s: float | None = None) -> dict[str, Any]:
    """Run a module as `torchrun` says, and return the last JSON object that rank 0 printed.

    Args:
        ranks: number of ranks, on this machine.
        module: the module to run.
        arguments: its command line.
        limit_s: seconds within which the ranks have to finish; None: no limit.

    Raises:
        TetherError: a rank failed, or the ranks have not finished in time.
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
    """Return the command line that runs a module once for each of this host's ranks.

    torchrun restarts nothing: hosts end and start together.

    Args:
        ranks: on each host.
        place: which host this is.
        port: of host 0, where torchrun on all hosts and the ranks meet; free, and used once.
        module: what each rank runs.
    """
    launcher = [
        "torch.distributed.run",
        *("--nnodes", str(place.hosts), "--node-rank", str(place.number), "--nproc-per-node", str(ranks)),
        *("--master-addr", place.address, "--master-port", str(port), "--max-restarts", "0"),
        *NO_LOGS,
    ]
    return [sys.executable, "-m", *launcher, "-m", module]
