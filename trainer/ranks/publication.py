"""Says which parts of the model each rank publishes, and which whole tensors each writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.messages import WeightPiece
from protocol.weights.boxes import whole

if TYPE_CHECKING:  # the registry, which every reader of settings imports, must not import torch
    import torch


@dataclass(frozen=True, slots=True)
class Publication:
    """The tensors that the ranks publish, and the pieces of them that each rank has."""

    names: tuple[str, ...]
    """Hugging Face names, in the order of `Backend.export`."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the whole tensors."""
    parts: tuple[tuple[WeightPiece, ...], ...]
    """By rank; together they have each element of each tensor once."""

    @classmethod
    def by_rank_0(cls, shapes: Mapping[str, tuple[int, ...]]) -> Publication:
        """Return a publication of whole tensors by rank 0, given their names and shapes."""
        pieces = tuple(WeightPiece(i, whole(shape)) for i, shape in enumerate(shapes.values()))
        return cls(tuple(shapes), tuple(shapes.values()), (pieces,))

    def with_tensors(self, extra: Mapping[str, torch.Tensor]) -> Publication:
        """Return a publication that has further tensors on its only rank; itself without any."""
        if not extra:
            return self
        shapes = dict(zip(self.names, self.shapes, strict=True))
        return Publication.by_rank_0(shapes | {name: tuple(it.shape) for name, it in extra.items()})

    def gathered(self) -> Publication:
        """Return the publication of the same tensors by rank 0."""
        return Publication.by_rank_0(dict(zip(self.names, self.shapes, strict=True)))


def shared_out(elements: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the rank that writes each tensor whole: the one with the fewest elements so far.

    Args:
        elements: name -> number of elements, in the order of the export.
        ranks: number of ranks.
    """
    held, found = [0] * ranks, {}
    for name, count in elements.items():
        found[name] = rank = held.index(min(held))
        held[rank] += count
    return found
