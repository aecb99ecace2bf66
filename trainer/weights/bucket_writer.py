"""Writes the tensors of a version into buckets as they are exported, and digests them there."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from protocol.device.slice_digests import Digests
from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import DTYPE_BYTES, BucketLayout, manifest_digest

Named = Iterable[tuple[str, torch.Tensor]]
"""(Hugging Face name, tensor) in the order of export."""
EXACT = (".e_score_correction_bias",)
"""Ends of the names of tensors that engines keep in float32 for any model dtype: rounded, they would make
routers choose other experts."""


class BucketContents(NamedTuple):
    """Contents of a version."""

    entries: tuple[TensorEntry, ...]
    """In the order of export."""
    buckets: tuple[int, ...]
    """Bytes of each bucket."""


class EntryBuilder:
    """Builds the entries of a version, tensor by tensor: `place` one, then `digest` it."""

    def __init__(self, bucket_bytes: int) -> None:
        self._layout = BucketLayout(bucket_bytes)
        self._placed: list[tuple[str, str, tuple[int, ...], int, int, int]] = []
        self._digests = Digests()

    def place(self, name: str, tensor: torch.Tensor) -> tuple[int, int]:
        """Return (bucket, offset in bytes) of the next tensor.

        Raises:
            WeightError: the name was placed before, or the dtype cannot be published.
        """
        dtype = checked_dtype(name, tensor)
        bucket, offset = self._layout.place(name, tensor.nbytes)
        self._placed.append((name, dtype, tuple(tensor.shape), bucket, offset, tensor.nbytes))
        return bucket, offset

    def digest(self, tensor: torch.Tensor) -> None:
        """Digest the tensor that was placed last, or its bytes as uint8, wherever they lie."""
        self._digests.add(tensor)

    def finish(self) -> BucketContents:
        """Return the placed tensors; wait for digests on the current stream.

        Raises:
            WeightError: no tensor was placed.
        """
        if not self._placed:
            raise WeightError("a version without tensors cannot be published")
        numbers = self._digests.numbers()
        entries = tuple(TensorEntry(*facts, n) for facts, n in zip(self._placed, numbers, strict=True))
        return BucketContents(entries, tuple(self._layout.buckets))


def fill_buckets(
    tensors: Named,
    bucket_bytes: int,
    allocate: Callable[[int, int], torch.Tensor],
    reserve: Callable[[int, int, int], None] = lambda bucket, offset, nbytes: None,
) -> BucketContents:
    """Copy all tensors into buckets and digest each in its bucket.

    Args:
        tensors: on any device, contiguous or not.
        bucket_bytes: size of a bucket; a larger tensor gets one of its own.
        allocate: (index, bytes) -> uint8 tensor of that size, on any device. Called for one bucket after the
            other; a bucket is complete when the next one is allocated, on a GPU when this function returns.
        reserve: (index, offset, bytes), called before that part of a bucket is written.

    Raises:
        WeightError: there are no tensors, a name comes twice, or a dtype cannot be published.
    """
    builder = EntryBuilder(bucket_bytes)
    current, memory = -1, torch.empty(0, dtype=torch.uint8)
    for name, tensor in tensors:
        bucket, offset = builder.place(name, tensor)
        if bucket != current:
            current, memory = bucket, allocate(bucket, max(bucket_bytes, tensor.nbytes))
        target = memory[offset : offset + tensor.nbytes]
        if tensor.nbytes:
            reserve(bucket, offset, tensor.nbytes)
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        builder.digest(target)
    return builder.finish()


def make_manifest(
    transport: str,
    location: str,
    epoch: str,
    version: int,
    contents: BucketContents,
    *,
    base_model: str,
) -> WeightManifest:
    """Return the manifest of a version with these contents; the arguments are fields of `WeightManifest`."""
    return WeightManifest(
        epoch=epoch,
        version=version,
        transport=transport,
        location=location,
        buckets=contents.buckets,
        tensors=contents.entries,
        digest=manifest_digest(contents.entries),
        base_model=base_model,
    )


def checked_dtype(name: str, tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype, as in `TensorEntry`.

    Raises:
        WeightError: tensors of this dtype cannot be published.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise WeightError(f"tensor {name}: dtype {dtype!r} cannot be sent")
    return dtype


def published_dtype(name: str, dtype: str) -> str:
    """Return the dtype in which a tensor of floating point is published to engines of `dtype`."""
    return "float32" if name.endswith(EXACT) else dtype


def in_dtype(tensors: Named, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in an engine's dtype.

    Not converted are those that are not floating point, and those that engines keep in float32, too.
    """
    for name, tensor in tensors:
        kind = getattr(torch, published_dtype(name, dtype))
        yield name, tensor.to(kind) if tensor.is_floating_point() else tensor


def drain(tensors: Named) -> None:
    """Consume the rest of an export, a collective that every rank must complete even if publishing failed."""
    for _ in tensors:
        pass
