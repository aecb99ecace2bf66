"""Splits the samples of a step into mini-batches, and each mini-batch over the replicas.

Shapes: N samples of the step, M mini-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import xxhash

from trainer.algorithms.base import Algorithm
from trainer.batch import StepTotals
from trainer.data.batch_stats import StepTally
from trainer.data.packing import balance
from trainer.data.prefix_tree import RowFamily

Costs = Callable[[torch.Tensor], torch.Tensor]
"""Sequence lengths in tokens (int64 [n]) -> cost of each sequence (float64 [n]), in any unit."""


@dataclass(frozen=True, slots=True)
class ReplicaDivision:
    """Assignment of rows to replicas."""

    pieces: tuple[tuple[int, ...], ...]
    """Row indices of each replica."""
    costs: tuple[float, ...]
    """Cost of each replica's rows."""

    @classmethod
    def of(
        cls, families: Sequence[RowFamily], samples: Sequence[int], costs: Costs, replicas: int
    ) -> "ReplicaDivision":
        """Assign families to replicas, keeping the highest cost of a replica low.

        Families stay whole unless splitting lowers the highest cost. Each part of a split family recomputes
        the shared tokens. The rows of a sample stay together.

        Args:
            families: families of whole samples.
            samples: sample of each row of the step.
            costs: cost function of sequences.
            replicas: number of replicas.
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
    """Assign whole families.

    The cost of tokens after a shared prefix is the increase of the sequence's cost.
    """
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


def _parts(family: RowFamily, samples: Sequence[int], max_parts: int) -> list[RowFamily]:
    """Cut a family into at most `max_parts` parts with about equal numbers of samples."""
    order: dict[int, int] = {}
    for row in family.rows:
        order.setdefault(samples[row], len(order))
    count = min(max_parts, len(order))
    places: list[list[int]] = [[] for _ in range(count)]
    for place, row in enumerate(family.rows):
        places[order[samples[row]] * count // len(order)].append(place)
    return [family.part(one) for one in places]


@dataclass(frozen=True, slots=True)
class MiniBatches:
    """Mini-batches of a step: whole samples, drawn regardless of their groups.

    Sizes differ by at most one sample. The draw depends only on the seed and the number of the step.
    """

    by_sample: torch.Tensor
    """int64 [N]: mini-batch of each sample."""
    totals: tuple[StepTotals, ...]
    """[M]: totals of each mini-batch."""
    draw: tuple[int, int]
    """Seed and number of the step."""
    rows: torch.Tensor
    """int64 [R]: sample of each row; a sample with branches has several rows."""

    @classmethod
    def of(cls, tally: StepTally, count: int, seed: int) -> "MiniBatches":
        """Split the counted samples into `count` mini-batches, at most one per sample."""
        samples, step = len(tally.trained_tokens), tally.totals()
        rows = torch.tensor(tally.sample_of_row)
        count = max(min(count, samples), 1)
        if count == 1:
            return cls(torch.zeros(samples, dtype=torch.int64), (step,), (seed, tally.step), rows)
        by_sample = torch.empty(samples, dtype=torch.int64)
        by_sample[torch.tensor(_shuffled(samples, seed, tally.step))] = (
            torch.arange(samples) * count // samples
        )
        trained, fresh = torch.tensor(tally.trained_tokens), torch.tensor(tally.fresh)
        totals = (
            StepTotals(
                samples=int(chosen.sum()),
                trained_tokens=int(trained[chosen].sum()),
                lag_max=step.lag_max,
                fresh=bool(fresh[chosen].any()),
            )
            for chosen in (by_sample == mini_batch for mini_batch in range(count))
        )
        return cls(by_sample, tuple(totals), (seed, tally.step), rows)

    def weights(self, algorithm: Algorithm, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss weight of each trained token of a sample, float32 [N].

        The algorithm computes the weights of each mini-batch as if the mini-batch were the whole batch.

        Args:
            algorithm: algorithm of the run.
            sampled_tokens: int64 [N]: sampled tokens of each sample.
        """
        weights = torch.empty(len(sampled_tokens))
        for mini_batch in range(len(self.totals)):
            chosen = self.by_sample == mini_batch
            weights[chosen] = algorithm.sample_weights(sampled_tokens[chosen])
        return weights

    @property
    def by_row(self) -> torch.Tensor:
        """Mini-batch of each row, int64 [R]."""
        return self.by_sample[self.rows]

    def order(self, epochs: int) -> tuple[int, ...]:
        """Return the mini-batch of each update. Every epoch is a new permutation of the mini-batches."""
        count = len(self.totals)
        return tuple(
            mini_batch
            for epoch in range(epochs)
            for mini_batch in (_shuffled(count, *self.draw, epoch) if count > 1 else range(count))
        )

    def divide(
        self, families: Sequence[RowFamily], costs: Costs, replicas: int
    ) -> tuple[list[list[int]], float]:
        """Assign each mini-batch's rows to replicas with `ReplicaDivision`.

        Args:
            families: families of all rows. Each family is in one mini-batch and has whole samples.
            costs: cost function of sequences.
            replicas: number of replicas.

        Returns:
            Row indices of each replica, ascending; and the relative excess of the highest replica cost over
            the mean, both summed over mini-batches.
        """
        own: list[list[RowFamily]] = [[] for _ in self.totals]
        for family, mini_batch in zip(
            families, self.by_row[[family.rows[0] for family in families]].tolist(), strict=True
        ):
            own[mini_batch].append(family)
        samples = self.rows.tolist()
        divisions = [ReplicaDivision.of(one, samples, costs, replicas) for one in own]
        pieces = [sorted(chain(*parts)) for parts in zip(*(one.pieces for one in divisions), strict=True)]
        dearest, total = (sum(join(one.costs) for one in divisions) for join in (max, sum))
        return pieces, dearest * replicas / total - 1 if total else 0.0


def _shuffled(count: int, *draw: int) -> Sequence[int]:
    """Return a permutation of 0 to count - 1 seeded by `draw`, equal across releases and machines."""

    def place(index: int) -> tuple[int, int]:
        return xxhash.xxh3_64_intdigest(" ".join(map(str, (*draw, index))).encode()), index

    return sorted(range(count), key=place)
