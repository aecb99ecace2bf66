"""Averages the rewards of a batch by the source of its prompts, and its scores by verifier."""

from collections.abc import Mapping

import msgspec
import numpy as np

from protocol.messages import ScoredRollout
from protocol.tensors import Array

SOURCE = "source"
"""Field of a prompt's metadata that names its source; every prompt of a mixture has it."""
MAX_NAMES = 32
"""Names of each kind that are averaged; groups of further ones count in no average."""


class ScoreMeans:
    """Means over the samples of the groups that were added so far."""

    def __init__(self) -> None:
        self._sums: tuple[dict[str, list[float]], dict[str, list[float]]] = ({}, {})
        """Name -> sum and number of its samples; of sources and of verifiers."""

    @property
    def reward_by_source(self) -> dict[str, float]:
        """Source -> mean reward; empty if no prompt names one."""
        return _means(self._sums[0])

    @property
    def score_by_verifier(self) -> dict[str, float]:
        """Verifier -> mean score before weighting."""
        return _means(self._sums[1])

    def add(self, scored: ScoredRollout) -> None:
        """Count the rewards and scores of a group."""
        source = _source(scored.rollout.metadata)
        rewards: Mapping[str, Array] = {source: scored.rewards} if source else {}
        for sums, arrays in zip(self._sums, (rewards, scored.components), strict=True):
            for name, array in arrays.items():
                if name in sums or len(sums) < MAX_NAMES:
                    values, found = array.numpy(), sums.setdefault(name, [0.0, 0.0])
                    found[0] += float(values.sum(dtype=np.float64))
                    found[1] += len(values)


def _means(sums: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: total / count for name, (total, count) in sorted(sums.items()) if count}


def _source(metadata: bytes) -> str:
    """Return the name of a prompt's source; empty if it has none, or one that is no text."""
    try:
        found = msgspec.msgpack.decode(metadata)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    name = found.get(SOURCE) if isinstance(found, dict) else None
    return name if isinstance(name, str) else ""
