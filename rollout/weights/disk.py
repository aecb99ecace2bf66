"""Receives a version from a safetensors file: `location` is a directory that contains `model.safetensors`."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from rollout.weights.base import Destination, no_destination
from rollout.weights.verification import Deadline, verify


class DiskReceiver:
    """Reads tensors by name, checks the file's own header against the manifest, and verifies the bytes."""

    digest = 0

    def tensors(
        self, manifest: WeightManifest, deadline_s: float, place: Destination = no_destination
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        deadline = Deadline(manifest, deadline_s)
        path = Path(manifest.location) / "model.safetensors"
        try:
            with safe_open(str(path), framework="pt") as file:
                present = set(file.keys())
                for entry in manifest.tensors:
                    deadline.remaining(f"reading {entry.name}")
                    if entry.name not in present:
                        raise WeightError(f"tensor {entry.name} is not in {path}")
                    tensor = file.get_tensor(entry.name)
                    _check_header(entry, tensor, path)
                    verify(entry, tensor)
                    yield entry, tensor
        except (OSError, SafetensorError) as error:
            raise WeightError(f"{path}: {error}") from error
        self.digest = manifest.digest

    def close(self) -> None:
        """Do nothing: the file is closed when the last tensor has been read."""


def _check_header(entry: TensorEntry, tensor: torch.Tensor, path: Path) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != entry.dtype or tuple(tensor.shape) != entry.shape:
        raise WeightError(
            f"tensor {entry.name} is {dtype}{list(tensor.shape)} in {path}, "
            f"{entry.dtype}{list(entry.shape)} in the manifest"
        )
