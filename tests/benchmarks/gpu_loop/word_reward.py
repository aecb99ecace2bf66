"""Scores a response by its number of words: costs nothing, and gives every group advantages."""


def score(*, response: str) -> float:
    """Return the number of words modulo 7, as a share of 7."""
    return (len(response.split()) % 7) / 7
