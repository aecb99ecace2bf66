"""Publishes versions as safetensors files, for engines on any host that mounts the directory.

    DIRECTORY/v00000012-EPOCH/model.safetensors   `location` of the manifest is the version's directory
    DIRECTORY/v00000012-EPOCH/manifest.json       the manifest, written last

In the manifest, the data section of the file is the only bucket. Versions outlive the run, so engines that
join late and restarted trainers find them.
"""

import json
import os
import struct
from pathlib import Path

import msgspec
import safetensors.torch
import torch

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.digests import digest
from trainer.config import WeightConfig
from trainer.weights.bucket_writer import BucketContents, Named, checked_dtype, drain, make_manifest
from trainer.weights.version_directories import VersionDirectories

FILE = "model.safetensors"
MANIFEST = "manifest.json"


class DiskSender:
    """Copies a version to host memory, then writes it to a directory."""

    def __init__(self, config: WeightConfig, run_dir: Path) -> None:
        """Make the directory, and take over the versions that an earlier trainer of the run published there.

        Raises:
            WeightError: the directory cannot be made or read.
        """
        self.directory = Path(config.directory) if config.directory else run_dir / "weights"
        self._versions = VersionDirectories(self.directory, config.keep, durable=True)
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
            self._require_space(sum(tensor.nbytes for tensor in host.values()))
            with self._versions.written(epoch, version) as (aside, final):
                safetensors.torch.save_file(host, aside / FILE, metadata={"format": "pt"})
                contents = _contents(aside / FILE, host)
                manifest = make_manifest(
                    "disk", str(final), epoch, version, contents, base_model=base_model, tied=tied
                )
                (aside / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
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
        """Keep all files: engines that join late and restarted trainers need them."""

    def _require_space(self, needed: int) -> None:
        found = os.statvfs(self.directory)
        free = found.f_bavail * found.f_frsize
        if free < needed:
            raise WeightError(
                f"{self.directory} has {free >> 20} MiB free, a version needs {needed >> 20} MiB: "
                "free some, or lower weights.keep"
            )


def _on_host(tensors: Named) -> dict[str, torch.Tensor]:
    """Return contiguous copies in host memory, after which the trainer may write to its tensors again."""
    host: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        if name in host:
            raise WeightError(f"tensor {name} comes twice")
        checked_dtype(name, tensor)
        host[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    if not host:
        raise WeightError("a version without tensors cannot be published")
    return host


def _contents(path: Path, host: dict[str, torch.Tensor]) -> BucketContents:
    """Return the entries in the order of export, with the offsets that the file's own header gives."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    total = path.stat().st_size - 8 - length
    entries = []
    for name, tensor in host.items():
        start, end = header[name]["data_offsets"]
        raw = tensor.reshape(-1).view(torch.uint8).numpy().data
        # An empty tensor shares its offset with another one; at the end of the bucket it overlaps none.
        offset = start if start < end else total
        entries.append(
            TensorEntry(
                name, checked_dtype(name, tensor), tuple(tensor.shape), 0, offset, end - start, digest(raw)
            )
        )
    return BucketContents(tuple(entries), (total,))
