"""Writes checkpoints at once, as the trainer does in the background."""

from pathlib import Path

import torch.distributed as dist

from trainer.backends.base import Backend
from trainer.ranks.collectives import is_distributed


def save_part(backend: Backend, directory: Path) -> None:
    """Write this rank's part into an existing directory; returns when every rank's part is on disk."""
    backend.copy_state().write(directory)
    if is_distributed():
        dist.barrier()
