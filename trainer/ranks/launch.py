"""Builds the command line that starts one process for each rank."""

import os
import sys

from trainer.hosts.place import HostPlace

NO_LOGS = ("--log-dir", os.devnull)
"""Ranks write to where torchrun writes; otherwise it makes directories for them that it never removes."""


def torchrun(ranks: int, module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module once for each of `ranks` ranks, on this machine."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *NO_LOGS]
    return [sys.executable, "-m", *launcher, "-m", module, *arguments]


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
