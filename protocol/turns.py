"""Reads the turns of a rollout's samples, and checks them against the other arrays.

Shapes: K turns of all samples, K_i turns of sample i; R rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from protocol.messages import Rollout
from protocol.rollout_view import checked_array, require, samples_of_rows


@dataclass(frozen=True, slots=True)
class TurnPlace:
    """Location of a turn: the text that the model sampled in answer to one call."""

    row: int
    """Index of the row that contains the turn."""
    first: int
    end: int
    """The turn covers the row's own tokens from `first` up to, not including, `end`."""


def turns_of(rollout: Rollout) -> list[list[TurnPlace]] | None:
    """Return the turns of each sample in order, at least one; None if every sample is one turn.

    Raises:
        ProtocolError: a turn is outside its sample's rows, turns overlap, a sample has no turn, a sampled
            token is in no turn, or the number of texts differs; the message names group and field.
    """
    group = rollout.group
    if rollout.turns is None:
        texts = len(rollout.turn_texts) + len(rollout.turn_contexts)
        require(texts == 0, group, "turn_texts", f"has {texts} texts, but the rollout has no turns")
        return None
    turns = checked_array(group, "turns", rollout.turns, "int32", (None, 4)).tolist()
    samples, lengths = samples_of_rows(rollout), rollout.lengths.numpy().tolist()
    places: list[list[TurnPlace]] = [[] for _ in range(samples[-1] + 1 if samples else 0)]
    before = 0
    for number, (sample, row, first, end) in enumerate(turns):
        fits = (
            0 <= row < len(samples)
            and samples[row] == sample
            and sample >= before
            and 0 <= first <= end <= lengths[row]
        )
        require(fits, group, "turns", f"row {number} ({sample}, {row}, {first}, {end}) is not in its sample")
        places[sample].append(TurnPlace(row, first, end))
        before = sample
    require(all(places), group, "turns", "has a sample without a turn")
    _check_cover(rollout, places, lengths)
    for field, values in (("turn_texts", rollout.turn_texts), ("turn_contexts", rollout.turn_contexts)):
        require(
            len(values) in (0, len(turns)), group, field, f"has {len(values)} entries for {len(turns)} turns"
        )
    return places


def by_sample(values: Sequence[str], turns: Sequence[Sequence[TurnPlace]]) -> list[list[str]]:
    """Split the entries [K] of all turns into one list per sample, [n][K_i]."""
    rest = iter(values)
    return [[next(rest) for _ in sample_turns] for sample_turns in turns]


def _check_cover(rollout: Rollout, turns: Sequence[Sequence[TurnPlace]], lengths: Sequence[int]) -> None:
    """Raise ProtocolError if turns overlap or a sampled token is in no turn."""
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    mask = checked_array(rollout.group, "loss_mask", rollout.loss_mask, "uint8", (int(starts[-1]),))
    count = np.zeros(len(mask) + 1, dtype=np.int64)  # sized by the mask, since `lengths` is untrusted
    for turn in (turn for sample_turns in turns for turn in sample_turns):
        count[starts[turn.row] + turn.first] += 1
        count[starts[turn.row] + turn.end] -= 1
    covered = np.cumsum(count)[:-1]
    require(bool((covered <= 1).all()), rollout.group, "turns", "overlap")
    require(bool((covered[mask == 1] == 1).all()), rollout.group, "turns", "leave out a sampled token")
