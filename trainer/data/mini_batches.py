"""Divides the samples of a step into mini-batches, and each of them between the replicas.

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


@dataclass(frozen=True, slots=True)
class MiniBatches:
    """The mini-batches of a step: whole samples, drawn without regard to their groups.

    Their sizes differ by one sample at most. Seed and number of the step alone decide.
    """

    of_sample: torch.Tensor
    """int64 [N]: the mini-batch of each sample."""
    totals: tuple[StepTotals, ...]
    """[M]: totals of each."""
    draw: tuple[int, int]
    """Seed and number of the step."""
    rows: torch.Tensor
    """int64 [R]: the sample of each row; a sample with branches has several."""

    @classmethod
    def of(cls, tally: StepTally, count: int, seed: int) -> "MiniBatches":
        """Divide the samples that were counted into `count` mini-batches, or as many as there are samples."""
        samples, step = len(tally.trained_tokens), tally.totals()
        rows = torch.tensor(tally.sample_of_row)
        count = max(min(count, samples), 1)
        if count == 1:
            return cls(torch.zeros(samples, dtype=torch.int64), (step,), (seed, tally.step), rows)
        of_sample = torch.empty(samples, dtype=torch.int64)
        of_sample[torch.tensor(_shuffled(samples, seed, tally.step))] = (
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
            for chosen in (of_sample == mini_batch for mini_batch in range(count))
        )
        return cls(of_sample, tuple(totals), (seed, tally.step), rows)

    def weights(self, algorithm: Algorithm, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Return the weight of each trained token of a sample, float32 [N].

        It is the algorithm's weight in a batch of the mini-batch's samples alone.

        Args:
            algorithm: the recipe.
            sampled_tokens: int64 [N].
        """
        weights = torch.empty(len(sampled_tokens))
        for mini_batch in range(len(self.totals)):
            chosen = self.of_sample == mini_batch
            weights[chosen] = algorithm.sample_weights(sampled_tokens[chosen])
        return weights

    @property
    def of_row(self) -> torch.Tensor:
        """The mini-batch of each row, int64 [R]."""
        return self.of_sample[self.rows]

    def order(self, epochs: int) -> tuple[int, ...]:
        """Return the mini-batch of each update: each comes once in an epoch, in an order of its own."""
        count = len(self.totals)
        return tuple(
            mini_batch
            for epoch in range(epochs)
            for mini_batch in (_shuffled(count, *self.draw, epoch) if count > 1 else range(count))
        )

    def divide(
        self, families: Sequence[RowFamily], costs: Costs, replicas: int
    ) -> tuple[list[list[int]], float]:
        """Divide each mini-batch between the replicas, as `ReplicaDivision` does.

        Args:
            families: all rows, each of one mini-batch, and of whole samples.
            costs: of a sequence.
            replicas: how many there are.

        Returns:
            For each replica the indices of its rows, ascending; and the share by which the sum of the most
            expensive parts of all mini-batches exceeds the sum of the mean ones.
        """
        own: list[list[RowFamily]] = [[] for _ in self.totals]
        for family, mini_batch in zip(
            families, self.of_row[[family.rows[0] for family in families]].tolist(), strict=True
        ):
            own[mini_batch].append(family)
        samples = self.rows.tolist()
        divisions = [ReplicaDivision.of(one, samples, costs, replicas) for one in own]
        pieces = [sorted(chain(*parts)) for parts in zip(*(one.pieces for one in divisions), strict=True)]
        dearest, total = (sum(join(one.costs) for one in divisions) for join in (max, sum))
        return pieces, dearest * replicas / total - 1 if total else 0.0


def _shuffled(count: int, *draw: int) -> Sequence[int]:
    """Return 0 to count - 1 in an order that `draw` decides, in every release and on every machine."""

    def place(index: int) -> tuple[int, int]:
        return xxhash.xxh3_64_intdigest(" ".join(map(str, (*draw, index))).encode()), index

    return sorted(range(count), key=place)
