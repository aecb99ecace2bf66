"""Copying the tensors of a version into buckets as they come, hashed where they lie; what all senders share.

The layout is that of `protocol.weights.buckets.plan_buckets`, found without knowing the later tensors.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from protocol.device.digests import Digests
from protocol.errors import WeightError
from protocol.messages import TensorEntry, WeightManifest
from protocol.weights.buckets import ALIGNMENT, DTYPE_BYTES, manifest_digest

Named = Iterable[tuple[str, torch.Tensor]]


@dataclass(slots=True)
class BucketWriter:
    """`plan_buckets`, one tensor at a time."""

    bucket_bytes: int
    buckets: list[int] = field(default_factory=list)
    """Bytes of each bucket so far; only the last one still grows."""
    _names: set[str] = field(default_factory=set)

    def place(self, name: str, nbytes: int) -> tuple[int, int]:
        """(bucket, offset) of the next tensor.

        Raises:
            WeightError: if the name has come before.
        """
        if name in self._names:
            raise WeightError(f"tensor {name} comes twice")
        self._names.add(name)
        start = -(-self.buckets[-1] // ALIGNMENT) * ALIGNMENT if self.buckets else 0
        if not self.buckets or (start and start + nbytes > self.bucket_bytes):
            self.buckets.append(0)
            start = 0
        self.buckets[-1] = start + nbytes
        return len(self.buckets) - 1, start


def fill_buckets(
    tensors: Named,
    bucket_bytes: int,
    allocate: Callable[[int, int], torch.Tensor],
    reserve: Callable[[int, int, int], None] = lambda bucket, offset, nbytes: None,
) -> tuple[tuple[TensorEntry, ...], tuple[int, ...]]:
    """Copy all tensors into buckets and hash each where it lies.

    Args:
        tensors: (name, tensor) in order, on any device, contiguous or not.
        bucket_bytes: size of a bucket; a larger tensor gets one of its own.
        allocate: (index, bytes) -> uint8 tensor of that size, on any device. It is called for one bucket
            after the other; a bucket is
            complete when it is called for the next one, on a GPU when this function returns.
        reserve: (index, offset, bytes), called before a part of a bucket is written.

    Returns:
        (entries, bytes of each bucket).

    Raises:
        WeightError: no tensors, a name twice, or a dtype that cannot be sent.
    """
    layout = BucketWriter(bucket_bytes)
    placed: list[tuple[str, str, tuple[int, ...], int, int, int]] = []
    digests = Digests()
    memory = torch.empty(0, dtype=torch.uint8)
    for name, tensor in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise WeightError(f"tensor {name}: dtype {dtype!r} cannot be sent")
        nbytes = tensor.numel() * tensor.element_size()
        known = len(layout.buckets)
        bucket, offset = layout.place(name, nbytes)
        if len(layout.buckets) > known:
            memory = allocate(bucket, max(bucket_bytes, nbytes))
        target = memory[offset : offset + nbytes]
        if nbytes:
            reserve(bucket, offset, nbytes)
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        placed.append((name, dtype, tuple(tensor.shape), bucket, offset, nbytes))
        digests.add(target)
    if not placed:
        raise WeightError("a version without tensors cannot be published")
    return tuple(
        TensorEntry(*facts, number) for facts, number in zip(placed, digests.numbers(), strict=True)
    ), tuple(layout.buckets)


def make_manifest(
    transport: str,
    location: str,
    epoch: str,
    version: int,
    layout: tuple[tuple[TensorEntry, ...], tuple[int, ...]],
    *,
    base_model: str,
    tied: tuple[tuple[str, str], ...],
) -> WeightManifest:
    """The manifest of what `fill_buckets` laid out."""
    entries, buckets = layout
    return WeightManifest(
        epoch=epoch,
        version=version,
        transport=transport,
        location=location,
        buckets=buckets,
        tensors=entries,
        tied=tied,
        digest=manifest_digest(entries),
        base_model=base_model,
    )


def in_dtype(tensors: Named, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as an engine of that dtype holds them; what is not a floating-point number keeps its
    own."""
    kind = getattr(torch, dtype)
    for name, tensor in tensors:
        yield name, tensor.to(kind) if tensor.is_floating_point() else tensor


def drain(tensors: Named) -> None:
    """Take what is left and throw it away: an export is a collective that every rank has to see through, also
    when publishing failed."""
    for _ in tensors:
        pass
