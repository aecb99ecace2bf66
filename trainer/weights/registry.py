"""Makes senders by the name of their transport, whose module is imported when it is chosen."""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.choices import checked_name
from protocol.errors import SettingsError
from protocol.host.key_proof import SenderKeys
from trainer.config import WeightConfig
from trainer.weights.base import WeightSender

if TYPE_CHECKING:  # whoever reads settings imports this module for the names
    import torch

    from trainer.backends.base import Backend
    from trainer.weights.parts.sender import PartSender

log = logging.getLogger("tether.weights")

TRANSPORTS = {
    "disk": "trainer.weights.files:disk_sender",
    "ipc": "trainer.weights.ipc:IpcSender",
    "nccl": "trainer.weights.nccl:NcclSender",
    "shared": "trainer.weights.shared:SharedSender",
    "shm": "trainer.weights.files:shm_sender",
}
"""Transport -> its sender's class, or the function that makes it."""

LISTENING = ("ipc", "nccl")
"""Transports whose sender listens for engines on `weights.host`."""
PARTS = ("ipc", "nccl")
"""Transports by which versions can stay on the trainer's ranks."""
PART_SENDER = "trainer.weights.parts.sender:PartSender"
"""Class of each rank's sender then."""

Masters = Callable[[], "Mapping[str, torch.Tensor]"]
"""Returns name -> tensor."""


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
    curve_dir: str = "",
) -> WeightSender:
    """Return the sender of `config.transport`; called in trainer rank 0 only.

    Args:
        config: section `[weights]`.
        run: name of the run.
        run_dir: directory of the run.
        masters: returns the backend's fp32 masters by the names of its parameters; called for `shared` only.
        parts: returns checkpoint name -> part of a master; by default the masters are what is published.
        curve_dir: directory of the bus's keys, which transports with connections ask for; empty: none.

    Raises:
        SettingsError: the transport is unknown, a number is out of range, or a key cannot be read.
        WeightError: the sender cannot be set up.
    """
    for name in ("bucket_mb", "keep", "timeout_s"):
        if getattr(config, name) <= 0:
            raise SettingsError(f"weights.{name} {getattr(config, name)}: must be positive")
    name = checked_name(config.transport, TRANSPORTS, "setting weights.transport:")
    sender: Callable[..., WeightSender] = pkgutil.resolve_name(TRANSPORTS[name])
    if name == "shared":
        return sender(run_dir, masters(), parts)
    keys = _keys(curve_dir)
    place: dict[str, tuple[Any, ...]] = {
        "shm": (run,),
        "disk": (run_dir,),
        "nccl": (keys,),
        "ipc": (keys,),
    }
    return sender(config, *place.get(name, ()))


def make_part_sender(
    config: WeightConfig, rank: int, backend: Backend, dtype: str, curve_dir: str = ""
) -> PartSender | None:
    """Return a rank's sender of its part of each version; None if versions go through rank 0 alone.

    They do with `ipc` and a trainer of several hosts, of which an engine could map the memory of one alone.

    Args:
        config: section `[weights]`.
        rank: that of this process.
        backend: this rank's part of the model.
        dtype: in which the weights are published.
        curve_dir: as in `make_sender`.

    Raises:
        SettingsError: the process group backend is unknown, or cannot be used here, or a key cannot be read.
        WeightError: the sender cannot be set up.
    """
    if config.transport not in PARTS or backend.publication is None:
        return None
    if config.transport == "ipc" and not _on_one_host():
        log.info("weights.gathered transport=ipc reason=several_hosts rank=%d", rank)
        return None
    sender: Callable[..., PartSender] = pkgutil.resolve_name(PART_SENDER)
    return sender(config, rank, backend.publication, dtype, _keys(curve_dir))


def _on_one_host() -> bool:
    """Return whether all ranks of the trainer are on this host, as torchrun says."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def _keys(curve_dir: str) -> SenderKeys | None:
    return SenderKeys(curve_dir) if curve_dir else None
