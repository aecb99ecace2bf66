"""Describes which parts of the model each rank publishes, and which whole tensors each rank writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.messages import WeightPiece
from protocol.weights.boxes import whole

if TYPE_CHECKING:  # processes that read settings import the registry, which must not import torch
    import torch


@dataclass(frozen=True, slots=True)
class Publication:
    """Published tensors, and the pieces on each rank."""

    names: tuple[str, ...]
    """Hugging Face names, in the order of `Backend.export`."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the whole tensors."""
    parts: tuple[tuple[WeightPiece, ...], ...]
    """By rank; together the pieces contain each element of each tensor once."""

    @classmethod
    def by_rank_0(cls, shapes: Mapping[str, tuple[int, ...]]) -> Publication:
        """Return a publication of whole tensors by rank 0."""
        pieces = tuple(WeightPiece(i, whole(shape)) for i, shape in enumerate(shapes.values()))
        return cls(tuple(shapes), tuple(shapes.values()), (pieces,))

    def with_tensors(self, extra: Mapping[str, torch.Tensor]) -> Publication:
        """Return a single-rank publication with further tensors; the publication itself without any."""
        if not extra:
            return self
        shapes = dict(zip(self.names, self.shapes, strict=True))
        return Publication.by_rank_0(shapes | {name: tuple(it.shape) for name, it in extra.items()})

    def gathered(self) -> Publication:
        """Return a publication of the same tensors by rank 0."""
        return Publication.by_rank_0(dict(zip(self.names, self.shapes, strict=True)))


def assign_writers(elements: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Assign each whole tensor to the rank with the fewest elements so far, which writes it.

    Args:
        elements: name -> number of elements, in export order.
    """
    elements_of_rank, writers = [0] * ranks, {}
    for name, count in elements.items():
        writers[name] = rank = elements_of_rank.index(min(elements_of_rank))
        elements_of_rank[rank] += count
    return writers
