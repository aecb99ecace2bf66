"""Copies the tensors of a version into buckets during the export, and digests them there."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from protocol.device.slice_digests import Digests
from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import DTYPE_BYTES, BucketLayout, manifest_digest

Named = Iterable[tuple[str, torch.Tensor]]
"""(Hugging Face name, tensor) in export order."""
EXACT = (".e_score_correction_bias",)
"""Suffixes of tensor names that engines keep in float32 for any model dtype, because rounding would change
the experts that routers choose."""


class BucketContents(NamedTuple):
    """Entries and buckets of a version."""

    entries: tuple[TensorEntry, ...]
    """In export order."""
    buckets: tuple[int, ...]
    """Size of each bucket, bytes."""


class EntryBuilder:
    """Builder of a version's entries: for each tensor, call `place`, then `digest`."""

    def __init__(self, bucket_bytes: int) -> None:
        self._layout = BucketLayout(bucket_bytes)
        self._placed: list[tuple[str, str, tuple[int, ...], int, int, int]] = []
        self._digests = Digests()

    def place(self, name: str, tensor: torch.Tensor) -> tuple[int, int]:
        """Return (bucket, byte offset) of the next tensor.

        Raises:
            WeightError: the name was already placed, or the dtype cannot be published.
        """
        dtype = checked_dtype(name, tensor)
        bucket, offset = self._layout.place(name, tensor.nbytes)
        self._placed.append((name, dtype, tuple(tensor.shape), bucket, offset, tensor.nbytes))
        return bucket, offset

    def digest(self, tensor: torch.Tensor) -> None:
        """Digest the last placed tensor, or its bytes as uint8, on any device."""
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
    """Copy all tensors into buckets and digest each tensor in its bucket.

    Args:
        tensors: on any device, contiguous or not.
        bucket_bytes: size of a bucket; a larger tensor gets a bucket to itself.
        allocate: (index, bytes) -> uint8 tensor of this size, on any device. Called for each bucket in order.
            A bucket is complete when the next bucket is allocated; on a GPU, when this function returns.
        reserve: (index, offset, bytes); called before writing to this range of a bucket.

    Raises:
        WeightError: the version has no tensors, a name twice, or a dtype that cannot be published.
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
    """Return the manifest of a version; the arguments are fields of `WeightManifest`."""
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
        WeightError: this dtype cannot be published.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise WeightError(f"tensor {name}: dtype {dtype!r} cannot be sent")
    return dtype


def published_dtype(name: str, dtype: str) -> str:
    """Return the dtype in which a floating-point tensor is published to engines of `dtype`."""
    return "float32" if name.endswith(EXACT) else dtype


def in_dtype(tensors: Named, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in an engine's dtype.

    Integer tensors, and tensors that engines keep in float32, are not converted.
    """
    for name, tensor in tensors:
        kind = getattr(torch, published_dtype(name, dtype))
        yield name, tensor.to(kind) if tensor.is_floating_point() else tensor


def drain(tensors: Named) -> None:
    """Exhaust an export, a collective that every rank must complete even if publishing failed."""
    for _ in tensors:
        pass
