"""Reads the published tensors of versions."""

from collections.abc import Mapping

import torch

from protocol.messages import WeightManifest
from protocol.weights.buckets import manifest_digest
from protocol.weights.draft_head import without_head
from protocol.weights.lora import LoraConfig, adapter_targets
from rollout.weights.files import FileReceiver


def read_version(manifest: WeightManifest, timeout_s: float) -> dict[str, torch.Tensor]:
    """Return copies of a version's published model tensors, by their Hugging Face names.

    Files that the sender unlinks are freed: no mapping outlives the call.

    Raises:
        WeightError: bytes are missing, or do not match the manifest.
    """
    slices = {entry.name: (tuple((0, n) for n in entry.shape),) for entry in manifest.tensors}
    received = FileReceiver().slices(manifest, slices, timeout_s)
    return without_head({piece.entry.name: piece.tensor.clone() for pieces in received for piece in pieces})


def model_digest(manifest: WeightManifest | None, version: int) -> int:
    """Return the digest of a version without its draft head; 0 if the manifest is of another version."""
    if manifest is None or manifest.version != version:
        return 0
    return manifest_digest(list(without_head({entry.name: entry for entry in manifest.tensors}).values()))


def merged_version(
    base: Mapping[str, torch.Tensor], published: Mapping[str, torch.Tensor], lora: LoraConfig
) -> dict[str, torch.Tensor]:
    """Return the whole model of a version: published tensors, or W + B A with scaled adapters.

    Args:
        base: tensors of the initial model.
        published: tensors of the version.
        lora: adapters of the run.
    """
    if not lora.rank:
        return dict(published)
    merged = dict(base)
    for target in adapter_targets({name: tuple(tensor.shape) for name, tensor in base.items()}, lora):
        change = published[target.b].float() @ published[target.a].float()
        merged[target.weight] = (base[target.weight].float() + change).to(base[target.weight].dtype)
    return merged
