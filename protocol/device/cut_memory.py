"""Views the memory of a bucket as pieces or cuts, for both ends of a transfer."""

from collections.abc import Iterable

import torch

from protocol.device.slice_digests import INTEGERS
from protocol.messages import WeightManifest
from protocol.weights.boxes import shape_of
from protocol.weights.slices import Cut, PiecePlace


def pieces_in(
    buckets: Iterable[torch.Tensor], places: Iterable[PiecePlace], manifest: WeightManifest, part: int
) -> list[torch.Tensor]:
    """Return a view of each piece of rank `part` in its bucket, in the shape of the piece."""
    memory = list(buckets)
    found = []
    for piece, place in zip(manifest.parts[part].pieces, places, strict=True):
        raw = memory[place.bucket][place.offset : place.offset + place.nbytes]
        found.append(raw.view(dtype_of(manifest, piece.tensor)).view(shape_of(piece.box)))
    return found


def cuts_in(memory: torch.Tensor, bucket: Iterable[Cut], manifest: WeightManifest) -> list[torch.Tensor]:
    """Return a view of each cut in the bucket's memory, in the shape of the cut."""
    views = []
    for cut in bucket:
        raw = memory[cut.offset : cut.offset + cut.nbytes]
        views.append(raw.view(dtype_of(manifest, cut.tensor)).view(shape_of(cut.box)))
    return views


def words_in(memory: torch.Tensor, bucket: Iterable[Cut], manifest: WeightManifest) -> torch.Tensor:
    """Return the memory of a bucket as integers of the smallest element's size, at most 4 bytes."""
    sizes = (dtype_of(manifest, cut.tensor).itemsize for cut in bucket)
    return memory.view(INTEGERS[min(4, *sizes)])


def dtype_of(manifest: WeightManifest, tensor: int) -> torch.dtype:
    """Return the dtype of a version's tensor by its index."""
    dtype: torch.dtype = getattr(torch, manifest.tensors[tensor].dtype)
    return dtype
