"""Divides samples between data-parallel replicas, by what it costs to compute them together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trainer.data.packing import balance
from trainer.data.prefix_tree import RowFamily

Costs = Callable[[torch.Tensor], torch.Tensor]
"""Returns what sequences of so many tokens (int64 [n]) cost, float64 [n], in any unit."""


@dataclass(frozen=True, slots=True)
class ReplicaDivision:
    """Rows of each replica."""

    pieces: tuple[tuple[int, ...], ...]
    """Their indices."""
    costs: tuple[float, ...]
    """What each replica's part costs."""

    @classmethod
    def of(
        cls, families: Sequence[RowFamily], samples: Sequence[int], costs: Costs, replicas: int
    ) -> "ReplicaDivision":
        """Divide families so that the dearest replica has little to do.

        Families stay whole, unless the dearest replica has less to do with parts of them, each of which
        computes shared tokens again. The rows of a sample stay together.

        Args:
            families: of whole samples.
            samples: the sample of each row of the step.
            costs: of a sequence.
            replicas: how many there are.
        """
        most = max((len(family.rows) for family in families), default=1) if replicas > 1 else 1
        divided = (
            _balanced(
                [part for family in families for part in _parts(family, samples, 2**n)], costs, replicas
            )
            for n in range(most.bit_length())
        )
        return min(divided, key=lambda division: max(division.costs))


def _balanced(units: Sequence[RowFamily], costs: Costs, replicas: int) -> ReplicaDivision:
    """Divide families that stay whole. A token behind others costs what it adds to their sequence."""
    whole, shared = (
        costs(torch.tensor([tokens for unit in units for tokens in getattr(unit, name)], dtype=torch.int64))
        for name in ("lengths", "shared")
    )
    sums = [float(part.sum()) for part in (whole - shared).split([len(unit.rows) for unit in units])]
    parts = balance(sums, replicas)
    return ReplicaDivision(
        tuple(tuple(row for unit in part for row in units[unit].rows) for part in parts),
        tuple(sum(sums[unit] for unit in part) for part in parts),
    )


def _parts(family: RowFamily, samples: Sequence[int], most: int) -> list[RowFamily]:
    """Cut a family into `most` parts of about as many samples each, or as many as it has samples."""
    order: dict[int, int] = {}
    for row in family.rows:
        order.setdefault(samples[row], len(order))
    count = min(most, len(order))
    places: list[list[int]] = [[] for _ in range(count)]
    for place, row in enumerate(family.rows):
        places[order[samples[row]] * count // len(order)].append(place)
    return [family.part(one) for one in places]
