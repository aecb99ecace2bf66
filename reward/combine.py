"""Combines the scores of several verifiers into one reward per sample."""

import math
from collections.abc import Mapping, Sequence

from protocol.errors import RewardError


class VerifierError(RewardError):
    """A verifier raised, hung, crashed or returned no finite number."""

    def __init__(self, verifier: str, error: str) -> None:
        super().__init__(f"{verifier}: {error}")
        self.verifier = verifier
        self.error = error


def combine(components: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> list[float]:
    """Return the rewards: reward_i = sum over verifiers v of weight_v * score_v,i.

    Args:
        components: verifier -> [n] scores.
        weights: verifier -> weight.

    Raises:
        VerifierError: there is no verifier, a score is NaN or infinite, or a verifier has no weight or
            another
            number of scores; names the verifier.
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
            if not math.isfinite(score):
                raise VerifierError(name, f"scored sample {i} as {score}")
    return [math.fsum(weights[name] * scores[i] for name, scores in components.items()) for i in range(count)]
