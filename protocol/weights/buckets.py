"""Lays out the tensors of a version in buckets, and checks manifests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import xxhash

from protocol.errors import WeightError
from protocol.messages.weights import TensorEntry, WeightManifest
from protocol.weights.provisional import is_provisional

ALIGNMENT = 64
"""Alignment of tensors, bytes. Every tensor starts on a cache line, so views of any dtype are aligned."""

ALONE_BYTES = 1 << 20
"""A part of a tensor of at least this size, bytes, is transferred alone: sharing a bucket would cost another
copy."""
ALONE_ON_GPU_BYTES = 32 << 20
"""`ALONE_BYTES` for transfers between GPUs, where another copy is cheaper than another call."""

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
}
"""torch dtype that can be published -> bytes per element."""

PLACE = attrgetter("name", "dtype", "shape", "bucket", "offset", "nbytes")
"""Returns all fields of a `TensorEntry` except the digest."""


@dataclass(slots=True)
class BucketLayout:
    """Layout of a version's tensors in buckets, filled one after the other in the order of the tensors.

    A tensor is appended to the last bucket, aligned, if the bucket stays within `bucket_bytes`; otherwise it
    opens a new bucket. A tensor larger than `bucket_bytes` has a bucket to itself.
    """

    bucket_bytes: int
    """Maximum size of a bucket with several tensors, bytes, above 0."""
    buckets: list[int] = field(default_factory=list)
    """Size of each bucket, bytes; only the last one still grows."""
    _names: set[str] = field(default_factory=set)

    def place(self, name: str, nbytes: int) -> tuple[int, int]:
        """Append a tensor; return its bucket and its offset in bytes.

        Raises:
            WeightError: the name was placed before.
        """
        if name in self._names:
            raise WeightError(f"tensor {name} is duplicated")
        self._names.add(name)
        offset = -(-self.buckets[-1] // ALIGNMENT) * ALIGNMENT if self.buckets else 0
        if not self.buckets or (offset and offset + nbytes > self.bucket_bytes):
            self.buckets.append(0)
            offset = 0
        self.buckets[-1] = offset + nbytes
        return len(self.buckets) - 1, offset


def bucket_name(index: int) -> str:
    """Return the name of a bucket's file in a version's directory."""
    return f"bucket_{index:05d}.bin"


def manifest_digest(tensors: Sequence[TensorEntry]) -> int:
    """Return the xxh3-64 of a version over (name, dtype, shape, digest) of its tensors in name order.

    The digest is independent of buckets and transport.
    """
    facts = sorted((entry.name, entry.dtype, entry.shape, entry.digest) for entry in tensors)
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(facts))


def layout_digest(manifest: WeightManifest) -> int:
    """Return the xxh3-64 of a version's layout, which both ends of a transfer compare.

    The last result is cached: hashing 36,000 tensors takes 25 ms of a core, which delays the engine's steps.
    """
    global _known_layout
    layout = (manifest.buckets, manifest.tensors, manifest.parts)
    known, digest = _known_layout
    if any(ours is not theirs for ours, theirs in zip(layout, known, strict=True)):
        places = list(map(PLACE, manifest.tensors))
        pieces = [part.pieces for part in manifest.parts]
        digest = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((manifest.buckets, places, pieces)))
        _known_layout = layout, digest
    return digest


_known_layout: tuple[tuple[object, object, object], int] = ((None, None, None), 0)
"""(buckets, tensors, parts) of the last manifest, and its layout digest."""


def check_digest(manifest: WeightManifest) -> None:
    """Raise WeightError if a manifest's digest does not match its entries; a provisional one has none."""
    if not is_provisional(manifest) and manifest.digest != manifest_digest(manifest.tensors):
        raise WeightError(f"manifest of version {manifest.version}: the digest does not match its tensors")


def check_layout(manifest: WeightManifest) -> None:
    """Check that a manifest's entries lie within its buckets.

    Raises:
        WeightError: entries overlap, exceed their bucket, repeat a name, or have a size that contradicts
            dtype and shape; the message names the first.
    """
    seen: set[str] = set()
    ends: dict[int, int] = {}
    for entry in sorted(manifest.tensors, key=lambda e: (e.bucket, e.offset, e.nbytes)):
        if entry.name in seen:
            raise WeightError(
                f"tensor {entry.name} is duplicated in the manifest of version {manifest.version}"
            )
        seen.add(entry.name)
        itemsize = DTYPE_BYTES.get(entry.dtype)
        if itemsize is None:
            raise WeightError(f"tensor {entry.name}: dtype {entry.dtype!r} is not known")
        count = 1
        for n in entry.shape:
            count *= n
        if any(n < 0 for n in entry.shape) or count * itemsize != entry.nbytes:
            raise WeightError(
                f"tensor {entry.name}: {entry.dtype}{list(entry.shape)} is not {entry.nbytes} bytes"
            )
        if (
            not 0 <= entry.bucket < len(manifest.buckets)
            or entry.offset + entry.nbytes > manifest.buckets[entry.bucket]
        ):
            raise WeightError(f"tensor {entry.name} exceeds bucket {entry.bucket}")
        if entry.offset < ends.get(entry.bucket, 0):
            raise WeightError(f"tensor {entry.name} overlaps the one before it in bucket {entry.bucket}")
        ends[entry.bucket] = entry.offset + entry.nbytes
