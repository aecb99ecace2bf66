"""Computes advantages per turn, for rollouts with scored turns.

The return of a turn is the sum of its reward and the rewards of the sample's later turns, because later text
cannot change earlier rewards. The algorithm compares returns per turn index: the second turn of a sample with
the second turns of its group. A group of single-turn samples therefore has the same advantages with and
without scored turns. Normalising turn returns over a group follows Ding et al. 2025 (arXiv 2511.14846), here
without a discount.

Shapes: N rows of the step, P context tokens and T_i own tokens of a row; k turns of a row; n samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.algorithms.base import Algorithm
from trainer.algorithms.registry import ALGORITHMS, check_turn_scores
from trainer.data.samples import BatchSample


@dataclass(frozen=True, slots=True)
class TurnAdvantages:
    """Advantages and returns of the turns of each row. A row without scored turns counts as one turn."""

    advantages: Sequence[NDArray[np.float32]]
    """[N] of [k]."""
    returns: Sequence[NDArray[np.float32]]
    """[N] of [k]."""
    for_critic: bool
    """Whether a critic computes the advantages, from per-token rewards."""

    def token_advantages(self, row: int, sample: BatchSample) -> NDArray[np.float32]:
        """Return the advantage of each token of a row, [P + T_i]; 0 outside the turns."""
        values = np.zeros(len(sample), dtype=np.float32)
        start = len(sample.prompt)
        for (first, end), advantage in zip(_bounds(sample), self.advantages[row].tolist(), strict=True):
            values[start + first : start + end] = advantage
        return values

    def token_rewards(self, row: int, sample: BatchSample) -> NDArray[np.float32]:
        """Return the reward after each token of a row, [P + T_i], for a critic.

        The last sampled token up to the end of a turn gets the turn's return minus the return of the row's
        next turn. The rewards after a token of a turn then sum to the turn's return, even if the sample's
        turns are in several rows.
        """
        values = np.zeros(len(sample), dtype=np.float32)
        returns = self.returns[row]
        gains = returns - np.append(returns[1:], np.float32(0))
        sampled = np.flatnonzero(sample.sampled)
        for (_, end), gain in zip(_bounds(sample), gains, strict=True):
            place = int(np.searchsorted(sampled, end)) - 1
            if place >= 0:
                values[len(sample.prompt) + sampled[place]] += gain
        return values


def turn_advantages(
    rows: Sequence[BatchSample],
    sample_of_row: Sequence[int],
    rewards: torch.Tensor,
    algorithm: Algorithm,
) -> TurnAdvantages | None:
    """Return the advantages of the turns of a step; None if turns are not scored.

    Args:
        rows: [N]: rows of the step. The rows of a sample are consecutive.
        sample_of_row: [N]: index of the sample of each row.
        rewards: float32 [n]: rewards of samples. A length penalty counts at the last turn.
        algorithm: computes advantages from rewards and group indices.

    Raises:
        SettingsError: turns are scored, and the algorithm applies a penalty to whole samples.
    """
    if all(row.turns is None for row in rows):
        return None
    check_turn_scores(algorithm.config)
    places: dict[tuple[int, int], int] = {}
    compared: dict[tuple[int, int], int] = {}
    returns: list[float] = []
    index: list[int] = []
    row_places: list[list[int]] = []
    for row, sample in zip(rows, sample_of_row, strict=True):
        shaping = float(rewards[sample]) - row.reward
        turns = (
            [(0, row.reward)]
            if row.turns is None
            else zip(row.turns.numbers.tolist(), row.turns.returns.tolist(), strict=True)
        )
        row_places.append([])
        for number, value in turns:
            place = places.setdefault((sample, number), len(places))
            if place == len(returns):
                returns.append(value + shaping)
                index.append(compared.setdefault((row.row, number), len(compared)))
            row_places[-1].append(place)
    values = torch.tensor(returns, dtype=torch.float32)
    advantages = algorithm.advantages(values, torch.tensor(index)).numpy()
    return TurnAdvantages(
        [advantages[chosen] for chosen in row_places],
        [values.numpy()[chosen] for chosen in row_places],
        ALGORITHMS[algorithm.config.name].has_critic,
    )


def digested(turns: TurnAdvantages | None) -> dict[str, torch.Tensor]:
    """Return the turn advantages for the step's digest; empty if turns are not scored."""
    return {} if turns is None else {"turn_advantages": torch.from_numpy(np.concatenate(turns.advantages))}


def _bounds(sample: BatchSample) -> Sequence[tuple[int, int]]:
    if sample.turns is None:
        return [(0, len(sample.tokens))]
    return [(first, end) for first, end in sample.turns.bounds.tolist()]
