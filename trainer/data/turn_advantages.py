"""Gives the tokens of each turn an advantage of their own, where turns were scored.

The return of a turn is its reward and those of the sample's later turns: the model's later text cannot change
earlier rewards. The recipe compares it as it compares rewards of samples, turn by turn: the second turn of a
sample with the second ones of its group. So a group whose samples are one turn each has the advantages that
it has without turns. Returns of turns that are normalised over a group follow Ding et al. 2025 (arXiv
2511.14846), here without a discount.

Shapes: N rows of the step, P tokens that a row follows, T_i of its own; k turns of a row; n samples.
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
    """Advantages and returns of the turns of each row; a row whose turns were not scored is one turn."""

    advantages: Sequence[NDArray[np.float32]]
    """[N] of [k]."""
    returns: Sequence[NDArray[np.float32]]
    """[N] of [k]."""
    for_critic: bool
    """Whether advantages are a critic's, made of the rewards of tokens."""

    def of_tokens(self, row: int, sample: BatchSample) -> NDArray[np.float32]:
        """Return the advantage of each token of a row, [P + T_i]; 0 outside of its turns."""
        values = np.zeros(len(sample), dtype=np.float32)
        start = len(sample.prompt)
        for (first, end), advantage in zip(_bounds(sample), self.advantages[row].tolist(), strict=True):
            values[start + first : start + end] = advantage
        return values

    def token_rewards(self, row: int, sample: BatchSample) -> NDArray[np.float32]:
        """Return the reward that follows each token of a row, [P + T_i], for a critic.

        The last sampled token of a turn, or the last one before it, has the turn's return less the return of
        the next turn in the row. So the rewards after a token of a turn add up to the turn's return, also
        where the sample's turns are in several rows.
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
    """Return the advantages of the turns of a step; None if no turn was scored.

    Args:
        rows: [N]: the step's rows; a sample's rows come one after the other.
        sample_of_row: [N]: index of the sample of each.
        rewards: float32 [n]: of samples, after any punishment of long ones, which counts at the last turn.
        algorithm: computes advantages from rewards and their groups.

    Raises:
        SettingsError: turns were scored, and the algorithm has a penalty of whole samples.
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
    """Return the turns' part of a step's digest: empty where no turn was scored."""
    return {} if turns is None else {"turn_advantages": torch.from_numpy(np.concatenate(turns.advantages))}


def _bounds(sample: BatchSample) -> Sequence[tuple[int, int]]:
    if sample.turns is None:
        return [(0, len(sample.tokens))]
    return [(first, end) for first, end in sample.turns.bounds.tolist()]
