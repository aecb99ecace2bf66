"""Writes the copies of a rank's state in a thread of its own, one after the other."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.ranks.collectives import control_device, is_distributed
from trainer.storage.host_state import HostState

log = logging.getLogger("tether.trainer")


class StateWriter:
    """One rank's writer of checkpoints."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._written: Future[None] | None = None

    def begin(self, state: HostState, directory: Path) -> None:
        """Start to write a part of a checkpoint; the one before must be finished."""
        if self._written is not None:
            raise RuntimeError("a checkpoint is begun before the last one is finished")
        self._written = self._thread.submit(state.write, directory)

    def wait(self) -> None:
        """Wait until this rank's part is written, or has failed; may be called in any thread."""
        if self._written is not None:
            self._written.exception()

    def finish(self) -> str:
        """Wait until every rank's part is on disk. A collective, which no other work may interleave.

        Returns:
            Why the checkpoint is incomplete; empty if every rank has written its part.
        """
        written, self._written = self._written, None
        error = written.exception() if written is not None else None
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
