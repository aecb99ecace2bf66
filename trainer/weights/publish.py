"""Publishes a version of the model; runs on every rank, because ranks gather or each publish a part."""

from collections.abc import Iterator
from itertools import chain

import torch

from protocol.device.slice_digests import Digests
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import manifest_digest
from trainer.backends.base import Backend
from trainer.lora import as_published
from trainer.weights.base import WeightSender
from trainer.weights.bucket_writer import checked_dtype, in_dtype


def publish(
    backend: Backend, sender: WeightSender | None, epoch: str, version: int, dtype: str
) -> WeightManifest | None:
    """Publish the weights from this rank; a collective. See `WeightSender.publish`.

    Args:
        backend: this rank's shard of the model, which may change after this function returns.
        sender: sender of this rank; None: only rank 0 publishes, and this rank helps to gather.
        dtype: dtype of the published weights.

    Returns:
        The manifest; None without a sender.
    """
    tensors = published(backend, dtype, in_parts=sender is not None and sender.in_parts)
    if sender is not None:
        return sender.publish(epoch, version, tensors, base_model=backend.architecture)
    for name, _ in tensors:
        raise RuntimeError(f"only rank 0 gets tensors from an export, but this rank got {name}")
    return None


def published(backend: Backend, dtype: str, *, in_parts: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the published tensors: this rank's pieces, or on rank 0 whole tensors.

    Adapters are scaled; the tensors of a draft head come last.
    """
    tensors = backend.pieces() if in_parts else backend.export()
    scaled = as_published(tensors, backend.targets, backend.lora)
    return in_dtype(chain(scaled, backend.extra_tensors.items()), dtype)


def published_digest(backend: Backend, dtype: str) -> int:
    """Return the manifest digest that the published weights would have; a collective.

    Each tensor is digested in place and then released. Only rank 0's result is valid.
    """
    facts, digests = [], Digests()
    for name, tensor in published(backend, dtype):
        facts.append((name, checked_dtype(name, tensor), tuple(tensor.shape)))
        digests.add(tensor)
    numbers = digests.numbers()
    return manifest_digest(
        [TensorEntry(*fact, 0, 0, 0, number) for fact, number in zip(facts, numbers, strict=True)]
    )
