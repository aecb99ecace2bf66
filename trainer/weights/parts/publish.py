"""Publishes a version from all ranks: every rank keeps its pieces, and rank 0 makes the manifest."""

import msgspec

from protocol.errors import WeightError
from protocol.messages import WeightDraft, WeightManifest
from trainer.backends.base import Backend
from trainer.backends.rank_commands import agreed, gather_bytes
from trainer.lora import as_published
from trainer.weights.parts.sender import PartReport, PartSender

_decoder = msgspec.msgpack.Decoder(PartReport)


def draft_parts(sender: PartSender, epoch: str, version: int) -> WeightDraft | None:
    """Accept requests for a version on every rank; a collective, after which it may be announced."""
    draft = sender.draft(epoch, version)
    gather_bytes(b"")
    return draft


def publish_parts(backend: Backend, sender: PartSender, epoch: str, version: int) -> WeightManifest | None:
    """Publish a version; a collective. When it returns, the model may change.

    Returns:
        The manifest on rank 0, None on the others.

    Raises:
        WeightError: on rank 0: a rank could not make its part. No rank serves the version then.
    """
    publication = backend.publication
    assert publication is not None
    names = (publication.names[piece.tensor] for piece in publication.parts[sender.rank])
    pieces = as_published(zip(names, backend.pieces(), strict=True), backend.targets, backend.lora)
    report = sender.fill(epoch, version, (tensor for _, tensor in pieces))
    reports = [_decoder.decode(data) for data in gather_bytes(msgspec.msgpack.encode(report))]
    manifest, problem = None, None
    if reports:
        try:
            manifest = sender.collect(reports, base_model=backend.architecture)
        except WeightError as error:
            problem = error
    sender.settle(agreed(manifest is not None))
    gather_bytes(b"")  # rank 0 announces the version only when every rank serves it
    if problem is not None:
        raise problem
    return manifest
