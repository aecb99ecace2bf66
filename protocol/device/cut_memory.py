"""Views the memory of a bucket of a transfer as the cuts that are packed into it, for both ends."""

from collections.abc import Iterable

import torch

from protocol.messages import WeightManifest
from protocol.weights.boxes import shape_of
from protocol.weights.slices import Cut


def cuts_in(memory: torch.Tensor, bucket: Iterable[Cut], manifest: WeightManifest) -> list[torch.Tensor]:
    """Return the elements of each cut in the memory of their bucket, in their shape."""
    views = []
    for cut in bucket:
        part = memory[cut.offset : cut.offset + cut.nbytes]
        views.append(part.view(getattr(torch, manifest.tensors[cut.tensor].dtype)).view(shape_of(cut.box)))
    return views
