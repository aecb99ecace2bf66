"""Holds the turns of a group's samples while they are scored, and combines what verifiers gave to them.

Shapes: n samples; K_i turns of sample i.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from protocol.messages import Rollout
from protocol.turns import by_sample, turns_of
from reward.combine import VerifierError

LARGEST = 1e30
"""Largest absolute score of a turn, weighted or not: they are sent as float32."""


@dataclass(slots=True)
class GroupTurns:
    """The turns of a group, and their scores once it is scored."""

    counts: Sequence[int]
    """[n]: K_i, at least 1."""
    texts: Sequence[Sequence[str]] | None = None
    """[n][K_i]; None: they were not sent."""
    contexts: Sequence[Sequence[str]] | None = None
    """[n][K_i]: what was written to the model before each turn."""
    components: dict[str, list[list[float]]] = field(default_factory=dict)
    """Verifier that scored turns -> [n][K_i], its scores before weighting."""
    rewards: list[list[float]] = field(default_factory=list)
    """[n][K_i]: combined rewards; empty if no verifier scored turns."""

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
        if len(scores) != self.counts[sample]:
            raise VerifierError(
                by, f"{len(scores)} scores for {self.counts[sample]} turns of sample {sample}"
            )
        for number, score in enumerate(scores):
            if not abs(score) <= LARGEST:
                raise VerifierError(by, f"scored turn {number} of sample {sample} as {score}")
        turn_scores = self.components.setdefault(verifier, [[] for _ in self.counts])
        turn_scores[sample] = list(scores)
        return math.fsum(scores)

    def forget(self, verifier: str, sample: int) -> None:
        """Drop the scores of a sample's turns, because a fallback scored the whole sample instead."""
        if verifier in self.components:
            self.components[verifier][sample] = []

    def combine(self, components: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> None:
        """Combine the scores of turns, if there are any, with the scores of whole samples.

        A turn's reward is the weighted sum of its scores. A score of a whole sample counts at its last turn,
        also where a verifier that scores turns was replaced by another one, or was too slow.

        Args:
            components: verifier -> [n] scores of samples; for turns, the sums of their scores.
            weights: verifier -> weight.

        Raises:
            VerifierError: a weighted score is too large; names the verifier.
        """
        if not self.components:
            return
        for name, turn_scores in self.components.items():
            for i, count in enumerate(self.counts):
                turn_scores[i] = turn_scores[i] or [0.0] * (count - 1) + [components[name][i]]
        whole = {name: scores for name, scores in components.items() if name not in self.components}
        for i, count in enumerate(self.counts):
            given = [
                [_weighted(name, weights[name], scores[i][k]) for name, scores in self.components.items()]
                for k in range(count)
            ]
            given[-1] += [_weighted(name, weights[name], scores[i]) for name, scores in whole.items()]
            self.rewards.append([math.fsum(scores) for scores in given])


def _weighted(verifier: str, weight: float, score: float) -> float:
    """Return the product. Raises VerifierError if it is too large."""
    if not abs(weight * score) <= LARGEST:
        raise VerifierError(verifier, f"scored {score}, which is too large with the weight {weight}")
    return weight * score
