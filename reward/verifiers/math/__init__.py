"""The verifier `math`: final answer, limits, parsing, equality."""

from reward.verifiers.math.equality import Options, score

__all__ = ["Options", "score"]
