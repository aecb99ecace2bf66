"""Adds the text of each turn to a generated group, for verifiers that score turns."""

from collections import defaultdict
from collections.abc import Callable

import msgspec
import numpy as np

from protocol.messages import Rollout
from protocol.turns import turns_of


def turn_texts(rollout: Rollout, text_of: Callable[[tuple[int, ...]], str]) -> Rollout:
    """Return the group with its turns as text, and with what was inserted before each.

    It is unchanged if every sample is one turn.

    Args:
        rollout: as assembled.
        text_of: detokenizes, without special tokens.
    """
    turns = turns_of(rollout)
    if turns is None:
        return rollout
    rows = np.split(rollout.tokens.numpy(), np.cumsum(rollout.lengths.numpy())[:-1])
    ends: dict[int, int] = defaultdict(int)
    texts, contexts = [], []
    for turn in (turn for of_sample in turns for turn in of_sample):
        row = rows[turn.row].tolist()
        contexts.append(text_of(tuple(row[ends[turn.row] : turn.first])))
        texts.append(text_of(tuple(row[turn.first : turn.end])))
        ends[turn.row] = turn.end
    return msgspec.structs.replace(rollout, turn_texts=tuple(texts), turn_contexts=tuple(contexts))
