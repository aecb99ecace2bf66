"""Publishes a version of the model; on every rank, because ranks gather it, or publish a part each."""

from protocol.messages import WeightManifest
from trainer.backends.base import Backend
from trainer.lora import as_published
from trainer.weights.base import WeightSender
from trainer.weights.bucket_writer import in_dtype


def publish(backend: Backend, sender: WeightSender, epoch: str, version: int, dtype: str) -> WeightManifest:
    """Publish the weights of a rank that has a sender; a collective. See `WeightSender.publish`.

    Args:
        backend: this rank's part of the model, which may change when this function returns.
        sender: this rank's.
        epoch: epoch of the trainer.
        version: number of the version.
        dtype: in which the weights are published.
    """
    tensors = backend.pieces() if sender.in_parts else backend.export()
    named = in_dtype(as_published(tensors, backend.targets, backend.lora), dtype)
    return sender.publish(epoch, version, named, base_model=backend.architecture)
