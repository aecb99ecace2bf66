"""Builds the command line that starts one process for each rank."""

import sys


def torchrun(ranks: int, module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module once for each of `ranks` ranks, on this machine."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, "-m", *launcher, "-m", module, *arguments]
