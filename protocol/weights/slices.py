"""Plans the slices of a version that the trainer's ranks send to one engine rank; equal on both ends.

If a version stays on the trainer's ranks, the manifest lists the pieces of each rank
(`WeightManifest.parts`). An engine rank requests boxes of tensors. The intersections of pieces and boxes
(cuts) are packed into buckets.

The sums h of `digests.py` verify the received bytes. The engine rank computes the sums of the received cuts.
Each trainer rank computes the sums of the unsent rest of partly sent pieces from its published bytes. Rank 0
sends the sums of all unrequested pieces, collected for the manifest. All sums add up to the tensor's sums, so
every engine rank verifies the digest of every whole tensor although it receives only parts.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest, WeightPiece
from protocol.weights.boxes import (
    Box,
    covers,
    dense_span,
    intersection,
    is_within,
    remainder,
    size_of,
    split,
    whole,
)
from protocol.weights.buckets import ALIGNMENT, DTYPE_BYTES, BucketLayout
from protocol.weights.digests import row_span, rows_of

MAX_WANTED_BYTES = 64 << 20
"""Maximum size of an encoded `Wanted`, bytes."""
MAX_BOXES = 4096
"""Maximum number of requested boxes of a tensor."""

Wanted = Mapping[str, tuple[Box, ...]]
"""Tensor name -> disjoint boxes that an engine rank requests."""


class Cut(NamedTuple):
    """Part of a piece, and its position in a bucket."""

    piece: int
    """Index into the pieces of the rank."""
    tensor: int
    """Index into the manifest's tensors."""
    box: Box
    offset: int
    """Byte offset in the bucket."""
    nbytes: int


class UnsentBoxes(NamedTuple):
    """The unsent boxes of a partly sent piece."""

    piece: int
    """Index into the pieces of the rank."""
    tensor: int
    boxes: tuple[Box, ...]


Span = tuple[int, int, int]
"""(tensor, first row, end row) of sums, end exclusive."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Plan of the cuts and sums that one trainer rank sends to one engine rank, in order."""

    buckets: tuple[tuple[Cut, ...], ...]
    unsent: tuple[UnsentBoxes, ...]
    unrequested: tuple[tuple[int, int], ...]
    """(rank, index of the piece) of all ranks' pieces without a requested element; only rank 0 sends their
    sums."""
    spans: tuple[Span, ...]
    """Spans of the sums that follow the buckets: one per entry of `unsent`, and one per tensor with
    unrequested pieces."""

    @property
    def rows(self) -> int:
        """Number of sums."""
        return sum(end - first for _, first, end in self.spans)

    @staticmethod
    def nbytes(bucket: tuple[Cut, ...]) -> int:
        """Return the size of a bucket, bytes."""
        return bucket[-1].offset + bucket[-1].nbytes


class BucketSizes(NamedTuple):
    """Sizes of the buckets that a rank sends; both ends plan with the same sizes."""

    bucket_bytes: int
    """Maximum size of a cut, and of a bucket with several cuts, bytes."""
    alone_bytes: int
    """Cuts of at least this size, bytes, have a bucket to themselves, which saves a copy on both ends."""


def transfer_of(
    manifest: WeightManifest, part: int, wanted: Wanted, sizes: BucketSizes, discarded: Collection[str] = ()
) -> Transfer:
    """Plan the transfer of rank `part`: every requested element of its pieces once; equal on both ends.

    Cuts of `discarded` tensors do not share buckets with other cuts, which may be sent as deltas.
    """
    pieces = manifest.parts[part].pieces
    cuts: list[tuple[int, WeightPiece, Box]] = []
    unsent: list[UnsentBoxes] = []
    for number, piece in enumerate(pieces):
        entry = manifest.tensors[piece.tensor]
        found = [
            box for want in wanted.get(entry.name, ()) if (box := intersection(piece.box, want)) is not None
        ]
        if left := remainder(piece.box, found) if found else []:
            unsent.append(UnsentBoxes(number, piece.tensor, tuple(left)))
        most = max(1, sizes.bucket_bytes // DTYPE_BYTES[entry.dtype])
        cuts += [(number, piece, small) for box in found for small in split(box, most)]
    unrequested = _unrequested(manifest, wanted) if part == 0 else ()
    spans = [
        (rest.tensor, *sum_span(manifest.tensors[rest.tensor], pieces[rest.piece].box)) for rest in unsent
    ]
    for tensor in sorted({manifest.parts[other].pieces[number].tensor for other, number in unrequested}):
        spans.append((tensor, 0, rows_of(manifest.tensors[tensor].nbytes)))
    kept = [cut for cut in cuts if manifest.tensors[cut[1].tensor].name not in discarded]
    others = [cut for cut in cuts if manifest.tensors[cut[1].tensor].name in discarded]
    buckets = (*_packed(manifest, kept, sizes), *_packed(manifest, others, sizes))
    return Transfer(buckets, tuple(unsent), unrequested, tuple(spans))


def _packed(
    manifest: WeightManifest, cuts: list[tuple[int, WeightPiece, Box]], sizes: BucketSizes
) -> Iterator[tuple[Cut, ...]]:
    bucket: list[Cut] = []
    end, is_alone = 0, False
    for number, piece, box in cuts:
        nbytes = size_of(box) * DTYPE_BYTES[manifest.tensors[piece.tensor].dtype]
        alone = nbytes >= sizes.alone_bytes
        if bucket and (alone or is_alone or end + nbytes > sizes.bucket_bytes):
            yield tuple(bucket)
            bucket, end = [], 0
        is_alone = alone
        bucket.append(Cut(number, piece.tensor, box, end, nbytes))
        end = -(-(end + nbytes) // ALIGNMENT) * ALIGNMENT
    if bucket:
        yield tuple(bucket)


class PiecePlace(NamedTuple):
    """Position of a piece in its rank's buckets, bytes."""

    bucket: int
    offset: int
    nbytes: int


def piece_places(
    manifest: WeightManifest, part: int, bucket_bytes: int
) -> tuple[tuple[int, ...], tuple[PiecePlace, ...]]:
    """Return the sizes of the buckets that hold the pieces of rank `part`, and the position of each piece."""
    layout = BucketLayout(bucket_bytes)
    places = []
    for number, piece in enumerate(manifest.parts[part].pieces):
        nbytes = size_of(piece.box) * DTYPE_BYTES[manifest.tensors[piece.tensor].dtype]
        places.append(PiecePlace(*layout.place(str(number), nbytes), nbytes))
    return tuple(layout.buckets), tuple(places)


def senders_of(manifest: WeightManifest, wanted: Wanted) -> list[int]:
    """Return the ranks that hold requested elements, in order, and last rank 0, which sends other sums."""
    found = [
        part
        for part in range(1, len(manifest.parts))
        if any(_is_requested(manifest, piece, wanted) for piece in manifest.parts[part].pieces)
    ]
    return [*found, 0]


def _unrequested(manifest: WeightManifest, wanted: Wanted) -> tuple[tuple[int, int], ...]:
    return tuple(
        (part, number)
        for part, found in enumerate(manifest.parts)
        for number, piece in enumerate(found.pieces)
        if size_of(piece.box) and not _is_requested(manifest, piece, wanted)
    )


def _is_requested(manifest: WeightManifest, piece: WeightPiece, wanted: Wanted) -> bool:
    wants = wanted.get(manifest.tensors[piece.tensor].name, ())
    return any(intersection(piece.box, want) is not None for want in wants)


def sum_span(entry: TensorEntry, box: Box) -> tuple[int, int]:
    """Return the span (first, end) of a tensor's rows that a slice covers, end exclusive."""
    itemsize = DTYPE_BYTES[entry.dtype]
    first, end = dense_span(entry.shape, box)
    return row_span(first * itemsize, end * itemsize) if size_of(box) else (0, 0)


def all_of(manifest: WeightManifest) -> Wanted:
    """Return a request for every tensor as a whole."""
    return {entry.name: (whole(entry.shape),) for entry in manifest.tensors}


def encode_wanted(wanted: Wanted, discarded: Collection[str] = ()) -> bytes:
    """Encode a request, and the tensors whose elements the engine rank discards before the next version."""
    return msgspec.msgpack.encode((dict(wanted), sorted(discarded)))


_decoder = msgspec.msgpack.Decoder(tuple[dict[str, tuple[tuple[tuple[int, int], ...], ...]], frozenset[str]])


def decode_wanted(data: bytes, manifest: WeightManifest) -> tuple[Wanted, frozenset[str]]:
    """Decode an engine rank's request for boxes of a version, and its `discarded` tensors.

    Raises:
        WeightError: the request is malformed, names an unknown tensor or box, or requests an element twice.
    """
    shapes = {entry.name: entry.shape for entry in manifest.tensors}
    try:
        wanted, discarded = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise WeightError(f"a receiver's slices cannot be read: {error}") from error
    for name, boxes in wanted.items():
        if name not in shapes or len(boxes) > MAX_BOXES:
            raise WeightError(f"a receiver wants {len(boxes)} slices of {name}, which cannot be served")
        whole_shape = shapes[name]
        if any(not is_within(box, whole_shape) for box in boxes):
            raise WeightError(f"a receiver wants slices of {name} that are not in {list(whole_shape)}")
        # overlapping boxes would be sent twice
        if sum(size_of(box) for box in boxes) > size_of(tuple((0, n) for n in whole_shape)):
            raise WeightError(f"a receiver requests elements of {name} twice")
    return wanted, discarded


def check_parts(manifest: WeightManifest) -> None:
    """Check that the ranks' pieces contain each element of each tensor exactly once.

    Raises:
        WeightError: the message names the first invalid tensor.
    """
    pieces = sorted(
        (piece for part in manifest.parts for piece in part.pieces), key=lambda piece: piece.tensor
    )
    at = 0
    for number, entry in enumerate(manifest.tensors):
        first = at
        while at < len(pieces) and pieces[at].tensor == number:
            at += 1
        if not covers(entry.shape, tuple(sorted(piece.box for piece in pieces[first:at]))):
            raise WeightError(
                f"tensor {entry.name}: the pieces of the trainer's ranks do not cover "
                f"{list(entry.shape)} in version {manifest.version}"
            )
    if at < len(pieces):
        raise WeightError(
            f"version {manifest.version}: a piece has an unknown tensor index ({pieces[at].tensor})"
        )
