"""Scores a response by its digits: every group of a random model has responses that differ in it."""


def score(*, response: str) -> float:
    """Return the share of characters that are digits; 0 of none."""
    return sum(character.isdigit() for character in response) / len(response) if response else 0.0
