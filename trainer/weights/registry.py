"""Senders by the name of their transport."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from protocol.choices import checked_name
from protocol.errors import SettingsError
from trainer.config import TRANSPORTS, WeightConfig
from trainer.weights.base import WeightSender
from trainer.weights.disk import DiskSender
from trainer.weights.ipc import IpcSender
from trainer.weights.nccl import NcclSender
from trainer.weights.shared import SharedSender
from trainer.weights.shm import ShmSender

Masters = Callable[[], Mapping[str, torch.Tensor]]


def _no_masters() -> Mapping[str, torch.Tensor]:
    raise SettingsError(
        "setting weights.transport: 'shared' needs a trainer whose masters the engine can read"
    )


def make_sender(
    config: WeightConfig,
    *,
    run: str,
    run_dir: Path,
    masters: Masters = _no_masters,
    parts: Masters | None = None,
) -> WeightSender:
    """The sender for `config.transport`. Made in trainer rank 0 only.

    Args:
        masters: of the backend, see there; asked for by `shared`.
        parts: of them, see there; by default they are what is published.

    Raises:
        SettingsError: if there is none of that name, or a number is out of range.
        WeightError: if the sender cannot set itself up.
    """
    for name in ("bucket_mb", "keep", "timeout_s"):
        if getattr(config, name) <= 0:
            raise SettingsError(f"weights.{name} {getattr(config, name)}: must be positive")
    if checked_name(config.transport, TRANSPORTS, "setting weights.transport:") == "shm":
        return ShmSender(config, run)
    if config.transport == "disk":
        return DiskSender(config, run_dir)
    if config.transport == "shared":
        return SharedSender(run_dir, masters(), parts)
    return IpcSender(config) if config.transport == "ipc" else NcclSender(config)
