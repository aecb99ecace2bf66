"""A verifier that rewards every other text: of two samples of a prompt about half are alike."""


def score(response: str) -> float:
    """1 if the sum of the characters is odd."""
    return float(sum(map(ord, response)) % 2)
