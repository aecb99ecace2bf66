"""Writes copies of a rank's state sequentially in a separate thread."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from trainer.ranks.collectives import control_device, is_distributed

log = logging.getLogger("tether.trainer")

CHECKPOINT, EXPORT = KINDS = ("checkpoint", "export")
"""Kinds of state that all ranks write; each may fail independently."""


class Writable(Protocol):
    """A rank's shard of state that all ranks write."""

    def write(self, directory: Path) -> None:
        """Write the shard into an existing directory. Raises OSError."""


class StateWriter:
    """One rank's writer of checkpoints and exports."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state")
        self._written: list[tuple[str, Future[None]]] = []

    def begin(self, part: Writable, directory: Path, kind: str = CHECKPOINT) -> None:
        """Start to write a shard after the shards begun since the last `finish`."""
        self._written.append((kind, self._thread.submit(part.write, directory)))

    def wait(self) -> None:
        """Wait until this rank's shards are written, or have failed; callable from any thread."""
        wait([future for _, future in self._written])

    def finish(self) -> dict[str, str]:
        """Wait until every rank's shards are on disk. A collective; do not interleave other collectives.

        Returns:
            Kind -> why it is incomplete; empty if every rank has written its shards.
        """
        written, self._written = self._written, []
        errors: dict[str, BaseException] = {}
        for kind, future in written:
            if (error := future.exception()) is not None:
                log.error("%s.part_failed error=%s", kind, error)
                errors.setdefault(kind, error)
        failed = _failed_ranks([kind in errors for kind in KINDS])
        return {
            kind: f"{kind}: {errors.get(kind) or f'rank {rank} could not write its part; its log says why'}"
            for kind, rank in zip(KINDS, failed, strict=True)
            if rank is not None
        }

    def close(self) -> None:
        """End the thread after pending writes."""
        self._thread.shutdown()


def _failed_ranks(failed: Sequence[bool]) -> list[int | None]:
    """Return, for each kind, the highest rank that failed, or None; equal on every rank."""
    if not is_distributed():
        return [0 if one else None for one in failed]
    found = torch.tensor([dist.get_rank() if one else -1 for one in failed], device=control_device())
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [rank if rank >= 0 else None for rank in found.tolist()]
