"""Writes the copies of a rank's state in a thread of its own, one after the other."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from trainer.ranks.collectives import control_device, is_distributed

log = logging.getLogger("tether.trainer")


class Writable(Protocol):
    """One rank's part of what all ranks write."""

    def write(self, directory: Path) -> None:
        """Write it into an existing directory. Raises OSError."""


class StateWriter:
    """One rank's writer of checkpoints and exports."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._written: list[Future[None]] = []

    def begin(self, part: Writable, directory: Path) -> None:
        """Start to write a part, after those that were begun since the last `finish`."""
        self._written.append(self._thread.submit(part.write, directory))

    def wait(self) -> None:
        """Wait until this rank's parts are written, or have failed; may be called in any thread."""
        wait(self._written)

    def finish(self) -> str:
        """Wait until every rank's parts are on disk. A collective, which no other work may interleave.

        Returns:
            Why one is incomplete; empty if every rank has written its parts.
        """
        written, self._written = self._written, []
        error = next((error for future in written if (error := future.exception()) is not None), None)
        if error is not None:
            log.error("checkpoint.part_failed error=%s", error)
        failed = _failed_rank(error is not None)
        if failed is None:
            return ""
        return f"checkpoint: {error or f'rank {failed} could not write its part; its log says why'}"

    def close(self) -> None:
        """End the thread, when what it writes is written."""
        self._thread.shutdown()


def _failed_rank(failed: bool) -> int | None:
    """Return the highest rank that says it failed, the same on every rank; None if none did."""
    if not is_distributed():
        return 0 if failed else None
    found = torch.tensor([dist.get_rank() if failed else -1], dtype=torch.int64, device=control_device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found) if int(found) >= 0 else None
