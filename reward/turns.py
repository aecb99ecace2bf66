"""Holds the turns of a group's samples and their scores, and combines the scores of several verifiers.

Shapes: n samples; K_i turns of sample i.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.messages import Rollout
from protocol.turns import by_sample, turns_of
from reward.combine import MOST, VerifierError


@dataclass(frozen=True, slots=True)
class GroupTurns:
    """The turns of a group."""

    counts: Sequence[int]
    """[n]: K_i, at least 1."""
    texts: Sequence[Sequence[str]] | None = None
    """[n][K_i]; None: the rollout worker sent none."""
    contexts: Sequence[Sequence[str]] | None = None
    """[n][K_i]: what was written to the model before each turn."""

    @classmethod
    def of(cls, rollout: Rollout) -> "GroupTurns":
        """Return the turns of a rollout.

        Raises:
            ProtocolError: they contradict its other arrays; names group and field.
        """
        turns = turns_of(rollout)
        if turns is None:
            texts = [[text] for text in rollout.responses]
            return cls([1] * len(texts), texts, [[""] for _ in texts])
        counts = [len(sample_turns) for sample_turns in turns]
        if not rollout.turn_texts or not rollout.turn_contexts:
            return cls(counts)
        return cls(counts, by_sample(rollout.turn_texts, turns), by_sample(rollout.turn_contexts, turns))

    def check_texts(self, verifier: str) -> None:
        """Check that a verifier that scores turns can be given them.

        Raises:
            VerifierError: the rollout worker sent no texts of turns.
        """
        if self.texts is None:
            raise VerifierError(
                verifier,
                "it scores turns, and the rollout worker sent no texts of them: its settings have no "
                "verifier 'function'",
            )


class TurnScores:
    """Scores of a group's turns, filled while the group is scored."""

    def __init__(self, counts: Sequence[int]) -> None:
        """Begin without scores. `counts` are the turns of each sample, [n]."""
        self._counts = counts
        self._components: dict[str, list[list[float]]] = {}

    def note(self, verifier: str, sample: int, scores: Sequence[float], *, by: str = "") -> float:
        """Keep the scores of a sample's turns, and return their sum.

        Args:
            verifier: the one whose scores they are.
            sample: its number.
            scores: one for each turn.
            by: the one that gave them, if it is another, for errors.

        Raises:
            VerifierError: there are more or fewer than turns, or one is not finite or too large.
        """
        by = by or verifier
        if len(scores) != self._counts[sample]:
            raise VerifierError(
                by, f"{len(scores)} scores for {self._counts[sample]} turns of sample {sample}"
            )
        for number, score in enumerate(scores):
            if not abs(score) <= MOST:
                raise VerifierError(
                    by,
                    f"scored turn {number} of sample {sample} as {score}; a score has to be a number within "
                    f"{MOST:g} of 0",
                )
        turn_scores = self._components.setdefault(verifier, [[] for _ in self._counts])
        turn_scores[sample] = list(scores)
        return math.fsum(scores)

    def forget(self, verifier: str, sample: int) -> None:
        """Drop the scores of a sample's turns, because a fallback scored the whole sample instead."""
        if verifier in self._components:
            self._components[verifier][sample] = []

    def filled(self, components: Mapping[str, Sequence[float]]) -> dict[str, list[list[float]]]:
        """Return verifier that scored turns -> [n][K_i], its scores before weighting.

        A score of a whole sample counts at its last turn: a fallback gave it, or `timeout_score`.

        Args:
            components: verifier -> [n] scores of samples; for turns, their sums.
        """
        return {
            name: [
                scores or [0.0] * (count - 1) + [components[name][i]]
                for i, (scores, count) in enumerate(zip(by_sample, self._counts, strict=True))
            ]
            for name, by_sample in self._components.items()
        }


def combine_turns(
    components: Mapping[str, Sequence[float]],
    turn_components: Mapping[str, Sequence[Sequence[float]]],
    weights: Mapping[str, float],
) -> list[list[float]]:
    """Return the rewards of turns, [n][K_i]; empty if no verifier scored turns.

    A turn's reward is the weighted sum of its scores. A score of a whole sample counts at its last turn.

    Args:
        components: verifier -> [n] scores of samples; for turns, their sums.
        turn_components: verifier that scored turns -> [n][K_i].
        weights: verifier -> weight.

    Raises:
        VerifierError: a weighted score is too large; names the verifier.
    """
    rewards = []
    whole = {name: scores for name, scores in components.items() if name not in turn_components}
    for i, turns in enumerate(next(iter(turn_components.values()), ())):
        scored = [
            [_weighted(name, weights[name], scores[i][k]) for name, scores in turn_components.items()]
            for k in range(len(turns))
        ]
        scored[-1] += [_weighted(name, weights[name], scores[i]) for name, scores in whole.items()]
        rewards.append([math.fsum(scores) for scores in scored])
    return rewards


def _weighted(verifier: str, weight: float, score: float) -> float:
    """Return the product. Raises VerifierError if it is too large."""
    if not abs(weight * score) <= MOST:
        raise VerifierError(verifier, f"scored {score}, which is too large with the weight {weight}")
    return weight * score
