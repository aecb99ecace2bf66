"""Creates senders by transport; a transport's module is imported when the transport is selected."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocol.choices import Entry, Registry, load
from protocol.errors import SettingsError
from protocol.host.key_proof import SenderKeys
from protocol.messages import WeightManifest
from trainer.config import WeightConfig
from trainer.weights.base import WeightSender

if TYPE_CHECKING:  # processes that read settings import this module for the names
    from trainer.backends.base import Backend

log = logging.getLogger("tether.weights")


@dataclass(frozen=True, slots=True)
class TransportEntry(Entry):
    """A transport: its sender's class, or the function that creates the sender."""

    listens: bool = False
    """Whether the sender listens for engines on `weights.host`."""
    files: bool = False
    """Whether versions are files, which engines and other processes can read repeatedly."""


TRANSPORTS = Registry(
    {
        "disk": TransportEntry("trainer.weights.files:disk_sender", files=True),
        "http": TransportEntry("trainer.weights.files:http_sender", listens=True, files=True),
        "ipc": TransportEntry("trainer.weights.served.sender:PartSender", listens=True),
        "nccl": TransportEntry("trainer.weights.served.sender:PartSender", listens=True),
        "shared": TransportEntry("trainer.weights.shared:SharedSender"),
        "shm": TransportEntry("trainer.weights.files:shm_sender", files=True),
    }
)


def make_sender(
    config: WeightConfig,
    backend: Backend,
    dtype: str,
    *,
    run: str,
    run_dir: Path,
    rank: int = 0,
    curve_dir: str = "",
) -> WeightSender | None:
    """Return a rank's sender; None for a rank other than 0 if rank 0 publishes all gathered tensors.

    With several hosts, the ranks gather for `ipc` and `shm`, because engines map the memory of one host only.
    With `disk` and `http`, each rank writes to files of its own in a directory shared by the hosts.

    Args:
        backend: this rank's shard of the model.
        dtype: dtype of the published weights.
        curve_dir: directory of the bus's keys, which transports with connections require; empty: no keys.

    Raises:
        SettingsError: the transport is unknown or unsupported here, a number is out of range, or a key cannot
            be read.
        WeightError: the sender cannot be set up.
    """
    for name in ("bucket_mb", "keep", "timeout_s"):
        if getattr(config, name) <= 0:
            raise SettingsError(f"weights.{name} {getattr(config, name)}: must be positive")
    entry = TRANSPORTS.find(config.transport, "setting weights.transport:")
    if config.transport == "shared" and backend.lora.rank:  # the base is shared; adapters go by shm
        config, entry = replace(config, transport="shm"), TRANSPORTS["shm"]
    sender: Any = load(entry.path)
    if config.transport == "shared" and sum(map(len, backend.replicas)) == 1:
        return None if rank else sender(run_dir, backend.masters(), backend.master_parts)
    blank = _blank(config, backend, dtype, rank)
    if config.transport == "shared":
        return _shared_part(run_dir, rank, blank, backend)
    if not entry.files:
        keys = SenderKeys(curve_dir) if curve_dir else None
        return sender(config, rank, blank, keys) if rank < len(blank.parts) else None
    if rank:
        return _follower(config, run_dir, rank, blank)
    layout = blank if len(blank.parts) > 1 or config.delta else None
    if config.transport == "shm":
        return sender(config, run, layout, run_dir)
    return sender(config, run_dir, layout, per_rank_files=len(blank.parts) > 1 and not _on_one_host())


def _follower(config: WeightConfig, run_dir: Path, rank: int, blank: WeightManifest) -> WeightSender | None:
    from trainer.weights.version_writer import PartFollower  # imports torch

    return PartFollower(config, run_dir, rank, blank) if len(blank.parts) > 1 else None


def _shared_part(run_dir: Path, rank: int, blank: WeightManifest, backend: Backend) -> WeightSender:
    from trainer.weights.shared_parts import SharedPartSender  # imports torch

    if len(blank.parts) == 1:
        raise SettingsError(
            "setting weights.transport: with 'shared' all ranks of the trainer must be on one host"
        )
    return SharedPartSender(run_dir, rank, blank, backend.masters(), backend.master_parts)


def _blank(config: WeightConfig, backend: Backend, dtype: str, rank: int) -> WeightManifest:
    """Return the layout of versions: in the parts of the ranks or, if the ranks gather, in one part."""
    from trainer.weights.part_layout import blank_manifest  # imports torch

    publication = backend.publication.with_tensors(backend.extra_tensors)
    if len(publication.parts) > 1 and (reason := _gather_reason(config)):
        log.info("weights.gathered transport=%s reason=%s rank=%d", config.transport, reason, rank)
        publication = publication.gathered()
    return blank_manifest(publication, dtype, config.bucket_mb << 20, config.transport)


def _gather_reason(config: WeightConfig) -> str:
    """Return why rank 0 must publish the tensors of several ranks; empty if each rank can publish."""
    return "" if config.transport in ("disk", "http", "nccl") or _on_one_host() else "several_hosts"


def _on_one_host() -> bool:
    """Return whether all ranks of the trainer are on this host, according to torchrun."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
