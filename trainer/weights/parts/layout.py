"""Describes a version that stays on the trainer's ranks: its manifest without digests and locations."""

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest, WeightPart
from protocol.weights.boxes import size_of, whole
from protocol.weights.buckets import DTYPE_BYTES, BucketLayout, manifest_digest
from protocol.weights.digests import digest_of_sums, rows_of
from protocol.weights.provisional import UNKNOWN
from protocol.weights.slices import sum_span
from trainer.ranks.publication import Publication
from trainer.weights.bucket_writer import published_dtype


def blank_manifest(
    publication: Publication, dtype: str, bucket_bytes: int, transport: str = "nccl"
) -> WeightManifest:
    """Return the manifest of no version yet; equal on every rank.

    Args:
        publication: that of the model.
        dtype: in which its tensors are published.
        bucket_bytes: size of a bucket.
        transport: by which engines get it.
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


def piece_spans(blank: WeightManifest, part: int) -> list[tuple[int, int]]:
    """Return the rows (first, after the last) of its tensor of which the sums of each piece of a rank are."""
    return [sum_span(blank.tensors[piece.tensor], piece.box) for piece in blank.parts[part].pieces]


def complete_manifest(
    blank: WeightManifest,
    spans: Sequence[Sequence[tuple[int, int]]],
    sums: Sequence[Sequence[torch.Tensor]],
    locations: Sequence[str],
    *,
    base_model: str,
) -> WeightManifest:
    """Return the manifest of a version that every rank has its part of.

    Args:
        blank: its epoch, version and layout.
        spans: `piece_spans` of each rank.
        sums: by rank, those of each piece, int64 on the CPU.
        locations: by rank, where its part is served.
        base_model: architecture name from the model's config.json.
    """
    totals = [np.zeros(rows_of(entry.nbytes), np.int64) for entry in blank.tensors]
    for part, places, found in zip(blank.parts, spans, sums, strict=True):
        for piece, (first, end), rows in zip(part.pieces, places, found, strict=True):
            totals[piece.tensor][first:end] += rows.numpy()
    entries = tuple(
        replace(entry, digest=digest_of_sums(total, entry.nbytes))
        for entry, total in zip(blank.tensors, totals, strict=True)
    )
    if not entries:
        raise WeightError("a version without tensors cannot be published")
    parts = tuple(
        WeightPart(location, part.pieces) for location, part in zip(locations, blank.parts, strict=True)
    )
    return replace(
        blank,
        location=locations[0],
        tensors=entries,
        parts=parts,
        digest=manifest_digest(entries),
        base_model=base_model,
    )
