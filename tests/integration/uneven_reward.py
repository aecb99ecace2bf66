"""A verifier that tells the samples of some prompts apart, and rewards those of others alike."""

from collections.abc import Sequence


def score(*, prompt: str, responses: Sequence[str]) -> list[float]:
    """0, 1, 0, 1 ... for two of four prompts; all 0 for another, and all 1 for the last."""
    kind = sum(map(ord, prompt)) % 4
    return [float(i % 2) if kind < 2 else float(kind - 2) for i in range(len(responses))]
