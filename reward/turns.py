"""Holds the turns of a group's samples and their scores, and combines the scores of several verifiers.

Shapes: n samples; K_i turns of sample i.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocol.messages import Rollout
from protocol.turns import by_sample, turns_of
from reward.combine import MAX_ABS_SCORE, VerifierError


@dataclass(frozen=True, slots=True)
class GroupTurns:
    """Turns of a group's samples."""

    counts: Sequence[int]
    """[n]: K_i, at least 1."""
    texts: Sequence[Sequence[str]] | None = None
    """[n][K_i]: text of each turn; None: the rollout worker sent no texts."""
    contexts: Sequence[Sequence[str]] | None = None
    """[n][K_i]: text added to the model's context before each turn."""

    @classmethod
    def of(cls, rollout: Rollout) -> "GroupTurns":
        """Return the turns of a rollout.

        Raises:
            ProtocolError: the turns contradict other arrays of the rollout. The message names group and
                field.
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
        """Check that turn texts are available for a verifier that scores turns.

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
        """Start without scores. `counts` [n] is the number of turns of each sample."""
        self._counts = counts
        self._components: dict[str, list[list[float]]] = {}

    def note(self, verifier: str, sample: int, scores: Sequence[float], *, by: str = "") -> float:
        """Store the scores of a sample's turns, and return their sum.

        Args:
            verifier: name of the verifier.
            sample: index of the sample.
            scores: one score per turn.
            by: name of the fallback that computed the scores, for errors; empty: `verifier`.

        Raises:
            VerifierError: the number of scores differs from the number of turns, or a score is not finite or
                too large.
        """
        by = by or verifier
        if len(scores) != self._counts[sample]:
            raise VerifierError(
                by, f"{len(scores)} scores for {self._counts[sample]} turns of sample {sample}"
            )
        for number, score in enumerate(scores):
            if not abs(score) <= MAX_ABS_SCORE:
                raise VerifierError(
                    by,
                    f"scored turn {number} of sample {sample} as {score}; a score must be between "
                    f"-{MAX_ABS_SCORE:g} and {MAX_ABS_SCORE:g}",
                )
        turn_scores = self._components.setdefault(verifier, [[] for _ in self._counts])
        turn_scores[sample] = list(scores)
        return math.fsum(scores)

    def forget(self, verifier: str, sample: int) -> None:
        """Drop a sample's turn scores, because a fallback scored the whole sample."""
        if verifier in self._components:
            self._components[verifier][sample] = []

    def filled(self, components: Mapping[str, Sequence[float]]) -> dict[str, list[list[float]]]:
        """Return the turn scores before weighting: name of each verifier that scored turns -> [n][K_i].

        A score of a whole sample, from a fallback or `timeout_score`, counts at the last turn.

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

    A turn's reward is the weighted sum of its scores. A score of a whole sample counts at the last turn.

    Args:
        components: verifier -> [n] scores of samples; for turns, their sums.
        turn_components: verifiers that scored turns -> [n][K_i] scores.
        weights: verifier -> weight.

    Raises:
        VerifierError: a weighted score is too large. The message names the verifier.
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
    if not abs(weight * score) <= MAX_ABS_SCORE:
        raise VerifierError(verifier, f"scored {score}, which is too large with the weight {weight}")
    return weight * score
