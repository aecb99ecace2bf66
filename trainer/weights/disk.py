"""Publishes versions as safetensors files, for engines anywhere that the directory is mounted, for late
joiners and restarts.

    DIRECTORY/v00000012-EPOCH/model.safetensors   `location` of the manifest is the version's directory
    DIRECTORY/v00000012-EPOCH/manifest.json       the manifest, written last

In the manifest the data section of the file is the one bucket.
"""

import json
import os
import struct
from pathlib import Path

import msgspec
import safetensors.torch
import torch

from protocol.errors import WeightError
from protocol.host.atomic_file import sync
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import DTYPE_BYTES
from protocol.weights.digests import digest
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import Named, drain, make_manifest
from trainer.weights.version_directories import VersionDirectories, remove

FILE = "model.safetensors"
MANIFEST = "manifest.json"


class DiskSender:
    """Holds one version in host memory while it writes it. Versions outlive the run."""

    def __init__(self, config: WeightConfig, run_dir: Path) -> None:
        """Make the directory, and take over what an earlier trainer of the run published there.

        Raises:
            WeightError: if the directory cannot be made or read.
        """
        self.directory = Path(config.directory) if config.directory else run_dir / "weights"
        self._versions = VersionDirectories(self.directory, config.keep)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._versions.adopt()
        except OSError as error:
            raise WeightError(f"{self.directory}: {error}") from error

    def publish(
        self,
        epoch: str,
        version: int,
        tensors: Named,
        *,
        base_model: str = "",
        tied: tuple[tuple[str, str], ...] = (),
    ) -> WeightManifest:
        try:
            host = _on_host(tensors)
            self._require_space(sum(tensor.numel() * tensor.element_size() for tensor in host.values()))
            aside, final = self._versions.begin(epoch, version)
            try:
                safetensors.torch.save_file(host, aside / FILE, metadata={"format": "pt"})
                layout = _layout(aside / FILE, host)
                manifest = make_manifest(
                    "disk", str(final), epoch, version, layout, base_model=base_model, tied=tied
                )
                (aside / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
                for path in (aside / FILE, aside / MANIFEST, aside):
                    sync(path)
                self._versions.finish(aside, final, version)
                sync(self.directory)
            except BaseException:
                remove(aside)
                raise
        except (OSError, safetensors.SafetensorError) as error:
            drain(tensors)
            raise WeightError(f"version {version} in {self.directory}: {error}") from error
        except WeightError:
            drain(tensors)
            raise
        return manifest

    def retire(self, in_use: frozenset[int]) -> None:
        self._versions.retire(in_use)

    def close(self) -> None:
        """Nothing to remove: late joiners and restarts need what is there."""

    def _require_space(self, needed: int) -> None:
        found = os.statvfs(self.directory)
        free = found.f_bavail * found.f_frsize
        if free < needed:
            raise WeightError(
                f"{self.directory} has {free >> 20} MiB free, a version needs {needed >> 20} MiB: free some, or lower weights.keep"
            )


def _on_host(tensors: Named) -> dict[str, torch.Tensor]:
    """Contiguous copies: when they exist, the trainer may write its tensors again."""
    host: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if name in host:
            raise WeightError(f"tensor {name} comes twice")
        if dtype not in DTYPE_BYTES:
            raise WeightError(f"tensor {name}: dtype {dtype!r} cannot be sent")
        host[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    if not host:
        raise WeightError("a version without tensors cannot be published")
    return host


def _layout(path: Path, host: dict[str, torch.Tensor]) -> tuple[tuple[TensorEntry, ...], tuple[int, ...]]:
    """Entries in the order of publication, with the places that the file's own header gives."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    total = path.stat().st_size - 8 - length
    entries = []
    for name, tensor in host.items():
        start, end = header[name]["data_offsets"]
        raw = tensor.reshape(-1).view(torch.uint8).numpy().data
        dtype = str(tensor.dtype).removeprefix("torch.")
        # an empty tensor shares its offset with another; at the end it is in nobody's way
        offset = start if start < end else total
        entries.append(TensorEntry(name, dtype, tuple(tensor.shape), 0, offset, end - start, digest(raw)))
    return tuple(entries), (total,)
