"""Divides the samples of a step into the mini-batches of its updates, the same way in every layout.

Shapes: N samples of the step, M mini-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import xxhash

from trainer.algorithms.base import Algorithm
from trainer.batch import StepTotals
from trainer.data.batch_stats import StepTally
from trainer.data.prefix_tree import RowFamily
from trainer.data.replica_division import Costs, ReplicaDivision


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
