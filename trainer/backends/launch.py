"""Builds the command line that starts one process a rank."""

import sys


def torchrun(ranks: int, module: str, *arguments: str) -> list[str]:
    """The command line that runs a module once a rank, on this machine."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, "-m", *launcher, "-m", module, *arguments]
