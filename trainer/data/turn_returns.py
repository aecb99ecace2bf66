"""Reads the return of each turn of a scored group: its reward and the rewards of the sample's later turns.

Shapes: R rows of the group; k turns of a row; K turns of all samples, K_i of sample i.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.messages import ScoredRollout
from protocol.rollout_view import checked_array, require
from protocol.turns import TurnPlace, turns_of

ROUNDING = 1e-4
"""By how much the rewards of a sample's turns may miss its own, for each unit of their sizes."""


@dataclass(frozen=True, slots=True)
class RowTurns:
    """The turns in a row, in the order of their tokens."""

    numbers: NDArray[np.int64]
    """[k]: the place of each among all turns of the sample, from 0."""
    bounds: NDArray[np.int64]
    """[k, 2]: the row's own tokens from the first number up to the second are the turn."""
    returns: NDArray[np.float64]
    """[k]: the reward of the turn and of all that the sample made after it."""


def turns_of_rows(scored: ScoredRollout, rows: int) -> list[RowTurns | None]:
    """Return the turns of each row, [R]; None where turns were not scored.

    Raises:
        ProtocolError: turns contradict the rollout, or their rewards are of another number, not finite,
            or do not add up to the samples' rewards; names group and field.
    """
    turns, group = turns_of(scored.rollout), scored.rollout.group
    if scored.turn_rewards is None:
        return [None] * rows
    if turns is None:
        require(False, group, "turn_rewards", "are given, but each sample is one turn")
        return []
    rewards = _checked_rewards(scored, turns)
    found: list[list[tuple[TurnPlace, int, float]]] = [[] for _ in range(rows)]
    for sample_turns, given in zip(turns, rewards, strict=True):
        returns = np.cumsum(given[::-1])[::-1]
        for number, (turn, value) in enumerate(zip(sample_turns, returns.tolist(), strict=True)):
            found[turn.row].append((turn, number, value))
    return [_row_turns(sorted(row, key=lambda item: (item[0].first, item[1]))) for row in found]


def differing_turns(scored: ScoredRollout, slack: float) -> bool:
    """Return whether a turn returns more than `slack` more than the same turn of another sample."""
    found: dict[int, list[float]] = {}
    for row in turns_of_rows(scored, len(scored.rollout.lengths.numpy())):
        if row is not None:
            for number, value in zip(row.numbers.tolist(), row.returns.tolist(), strict=True):
                found.setdefault(number, []).append(value)
    return any(max(values) - min(values) > slack for values in found.values())


def _checked_rewards(
    scored: ScoredRollout, turns: Sequence[Sequence[TurnPlace]]
) -> list[NDArray[np.float64]]:
    """Return the reward of each turn, [n][K_i]."""
    group, ends = scored.rollout.group, np.cumsum([len(sample_turns) for sample_turns in turns])
    assert scored.turn_rewards is not None
    flat = checked_array(group, "turn_rewards", scored.turn_rewards, "float32", (int(ends[-1]),))
    require(bool(np.isfinite(flat).all()), group, "turn_rewards", "is not finite")
    rewards = np.split(flat.astype(np.float64), ends[:-1])
    for sample, (given, reward) in enumerate(zip(rewards, scored.rewards.numpy().tolist(), strict=True)):
        size = 1 + float(np.abs(given).sum())
        require(
            abs(float(given.sum()) - reward) <= ROUNDING * size,
            group,
            "turn_rewards",
            f"of sample {sample} add up to {given.sum():g}, not to its reward {reward:g}",
        )
    return rewards


def _row_turns(turns: Sequence[tuple[TurnPlace, int, float]]) -> RowTurns:
    bounds = [(turn.first, turn.end) for turn, _, _ in turns]
    return RowTurns(
        np.array([number for _, number, _ in turns], dtype=np.int64),
        np.array(bounds, dtype=np.int64).reshape(-1, 2),
        np.array([value for _, _, value in turns], dtype=np.float64),
    )
