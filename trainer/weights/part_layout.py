"""Describes a version that the trainer's ranks publish in parts: a manifest without digests and locations."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import msgspec
import torch
from msgspec.structs import replace

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest, WeightPart, WeightPiece
from protocol.weights.boxes import shape_of, size_of, whole
from protocol.weights.buckets import DTYPE_BYTES, BucketLayout, manifest_digest
from protocol.weights.deltas import TensorChange
from protocol.weights.provisional import UNKNOWN, with_digests
from trainer.ranks.publication import Publication
from trainer.weights.bucket_writer import Named, published_dtype


def blank_manifest(
    publication: Publication, dtype: str, bucket_bytes: int, transport: str = "nccl"
) -> WeightManifest:
    """Return a manifest without version, digests and locations; equal on every rank.

    Args:
        dtype: dtype of the published tensors.
    """
    layout = BucketLayout(bucket_bytes)
    entries = []
    for name, shape in zip(publication.names, publication.shapes, strict=True):
        kind = published_dtype(name, dtype)
        nbytes = size_of(whole(shape)) * DTYPE_BYTES[kind]
        entries.append(TensorEntry(name, kind, shape, *layout.place(name, nbytes), nbytes, UNKNOWN))
    return WeightManifest(
        epoch="",
        version=0,
        transport=transport,
        location="",
        buckets=tuple(layout.buckets),
        tensors=tuple(entries),
        parts=tuple(WeightPart("", pieces) for pieces in publication.parts),
    )


class PartReport(msgspec.Struct, frozen=True):
    """Report of a rank to rank 0 about its part of a version."""

    location: str
    error: str
    """Why the part failed; empty: success."""
    sums: bytes
    """Sums of the rank's pieces, concatenated, int64."""
    changes: tuple[TensorChange, ...] = ()
    """Positions of the rank's changes in its file, if it wrote changes."""
    nbytes: int = 0
    """Size of the rank's file, bytes."""


def checked_pieces(
    blank: WeightManifest, rank: int, tensors: Named
) -> Iterator[tuple[WeightPiece, torch.Tensor]]:
    """Yield a rank's pieces with their elements from its export.

    Raises:
        WeightError: the export has a different tensor or shape; the message names the tensor.
    """
    for piece, named in zip_longest(blank.parts[rank].pieces, tensors):
        name = blank.tensors[piece.tensor].name if piece is not None else None
        if piece is None or named is None or name != named[0]:
            raise WeightError(f"the export has {named and named[0]} where the version has {name}")
        shape = shape_of(piece.box)
        if tuple(named[1].shape) != shape:
            raise WeightError(f"{name}: a piece of {list(named[1].shape)}, not {list(shape)}")
        yield piece, named[1]


def complete_manifest(
    blank: WeightManifest, digests: Sequence[int], locations: Sequence[str], *, base_model: str
) -> WeightManifest:
    """Return the manifest of a version whose parts exist on every rank.

    Args:
        blank: epoch, version and layout.
        locations: by rank, where the part is served.
        base_model: architecture name from the model's config.json.

    Raises:
        WeightError: the version has no tensors.
    """
    if not blank.tensors:
        raise WeightError("a version without tensors cannot be published")
    parts = tuple(
        WeightPart(location, part.pieces) for location, part in zip(locations, blank.parts, strict=True)
    )
    complete = with_digests(blank, digests)
    return replace(
        complete,
        location=locations[0],
        parts=parts,
        digest=manifest_digest(complete.tensors),
        base_model=base_model,
    )
