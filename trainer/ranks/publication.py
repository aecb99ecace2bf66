"""Says which parts of the model each rank publishes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocol.messages import WeightPiece
from protocol.weights.boxes import whole


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

    def gathered(self) -> Publication:
        """Return the publication of the same tensors by rank 0."""
        return Publication.by_rank_0(dict(zip(self.names, self.shapes, strict=True)))
