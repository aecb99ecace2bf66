"""Combines the scores of several verifiers into one reward per sample."""

import math
from collections.abc import Mapping, Sequence

from protocol.errors import RewardError

MAX_ABS_SCORE = 1e30
"""Largest absolute score of a sample or a turn, weighted or not; scores are sent as float32."""


class VerifierError(RewardError):
    """A verifier raised, timed out, crashed or did not return finite numbers."""

    def __init__(self, verifier: str, error: str) -> None:
        super().__init__(f"{verifier}: {error}")
        self.verifier = verifier
        self.error = error


def combine(components: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> list[float]:
    """Return the rewards: reward_i = sum over verifiers v of weight_v * score_v,i.

    The absolute value of each score and weighted score must be at most `MAX_ABS_SCORE`.

    Args:
        components: verifier -> [n] scores.
        weights: verifier -> weight.

    Raises:
        VerifierError: there are no verifiers; a score is NaN, infinite or too large; or a verifier has no
            weight or a wrong number of scores. The message names the verifier.
    """
    if not components:
        raise VerifierError("reward", "no verifier and no reward of the environment; set reward.verifiers")
    count = len(next(iter(components.values())))
    for name, scores in components.items():
        if name not in weights:
            raise VerifierError(name, "has no weight")
        if len(scores) != count:
            raise VerifierError(name, f"{len(scores)} scores for {count} samples")
        for i, score in enumerate(scores):
            if not max(abs(score), abs(weights[name] * score)) <= MAX_ABS_SCORE:
                raise VerifierError(
                    name,
                    f"scored sample {i} as {score}; a score, and its product with the weight "
                    f"{weights[name]:g}, must be between -{MAX_ABS_SCORE:g} and {MAX_ABS_SCORE:g}",
                )
    return [math.fsum(weights[name] * scores[i] for name, scores in components.items()) for i in range(count)]
