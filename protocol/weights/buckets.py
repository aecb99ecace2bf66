"""How the tensors of a version are laid out in buckets, and the digest of the whole. Digests of single
tensors: `digests.py`."""

from collections.abc import Iterable, Sequence

import msgspec
import xxhash

from protocol.errors import WeightError
from protocol.messages.weights import TensorEntry, WeightManifest
from protocol.weights.provisional import is_provisional

ALIGNMENT = 64
"""Bytes: every tensor starts on a cache line, so that a view of any dtype is aligned."""

ALONE_BYTES = 1 << 20
"""From this size on a tensor is sent by itself: what comes with others is copied once more."""
ALONE_ON_GPU_BYTES = 32 << 20
"""The same between GPUs, where a copy costs less than another call."""

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


class Placement(msgspec.Struct, frozen=True):
    """Where one tensor goes."""

    name: str
    bucket: int
    offset: int
    nbytes: int


def plan_buckets(sizes: Iterable[tuple[str, int]], bucket_bytes: int) -> tuple[list[Placement], list[int]]:
    """Lay tensors, given as (name, bytes) in order, into buckets of at most `bucket_bytes`.

    A tensor larger than a bucket gets a bucket of its own. Returns placements in the same order, and the
    bytes of each bucket.

    Raises:
        ValueError: if `bucket_bytes` is not positive or a name comes twice.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes is {bucket_bytes}, must be positive")
    placements: list[Placement] = []
    buckets: list[int] = []
    seen: set[str] = set()
    for name, nbytes in sizes:
        if name in seen:
            raise ValueError(f"tensor {name} comes twice")
        seen.add(name)
        start = -(-buckets[-1] // ALIGNMENT) * ALIGNMENT if buckets else 0
        if not buckets or (start and start + nbytes > bucket_bytes):
            buckets.append(0)
            start = 0
        placements.append(Placement(name, len(buckets) - 1, start, nbytes))
        buckets[-1] = start + nbytes
    return placements, buckets


class Chunk(msgspec.Struct, frozen=True):
    """Bytes of one bucket that are sent at once."""

    bucket: int
    start: int
    end: int
    entries: tuple[TensorEntry, ...]


def chunks(manifest: WeightManifest, alone_bytes: int = ALONE_BYTES) -> list[Chunk]:
    """How the buckets of a version are cut for a receiver that can put large tensors straight where they
    belong.

    A tensor of `alone_bytes` or more is a piece, its smaller neighbours in a bucket are one together. Both
    ends cut alike.
    """
    found: list[Chunk] = []
    run: list[TensorEntry] = []

    def end_run() -> None:
        if run:
            found.append(Chunk(run[0].bucket, run[0].offset, run[-1].offset + run[-1].nbytes, tuple(run)))
            run.clear()

    for entry in sorted(manifest.tensors, key=lambda e: (e.bucket, e.offset, e.nbytes)):
        if run and (run[0].bucket != entry.bucket or entry.nbytes >= alone_bytes):
            end_run()
        run.append(entry)
        if entry.nbytes >= alone_bytes:
            end_run()
    end_run()
    return found


def manifest_digest(tensors: Sequence[TensorEntry]) -> int:
    """One number for a whole version: over (name, dtype, shape, digest) in name order, independent of buckets
    and transport."""
    facts = sorted((entry.name, entry.dtype, entry.shape, entry.digest) for entry in tensors)
    return xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(facts))


def layout_digest(manifest: WeightManifest) -> int:
    """One number for where the bytes of a version lie and how they are cut: both ends of a transfer have to
    do it alike."""
    facts = [(entry.name, entry.dtype, entry.shape, entry.bucket, entry.offset) for entry in manifest.tensors]
    return xxhash.xxh3_64_intdigest(
        msgspec.msgpack.encode((manifest.buckets, facts, ALONE_BYTES, ALONE_ON_GPU_BYTES))
    )


def check_manifest(manifest: WeightManifest) -> None:
    """Refuse a manifest whose entries overlap, leave their bucket, repeat a name or contradict its digest; a
    draft has none.

    Raises:
        WeightError: naming the first culprit.
    """
    seen: set[str] = set()
    ends: dict[int, int] = {}
    for entry in sorted(manifest.tensors, key=lambda e: (e.bucket, e.offset, e.nbytes)):
        if entry.name in seen:
            raise WeightError(
                f"tensor {entry.name} comes twice in the manifest of version {manifest.version}"
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
            raise WeightError(f"tensor {entry.name} leaves bucket {entry.bucket}")
        if entry.offset < ends.get(entry.bucket, 0):
            raise WeightError(f"tensor {entry.name} overlaps the one before it in bucket {entry.bucket}")
        ends[entry.bucket] = entry.offset + entry.nbytes
    if not is_provisional(manifest) and manifest.digest != manifest_digest(manifest.tensors):
        raise WeightError(f"manifest of version {manifest.version}: the digest does not match its tensors")
