"""Scores a response by its share of digits, which differs between responses of a random model."""


def score(*, response: str) -> float:
    """Return the share of digits among the characters; 0 for an empty response."""
    return sum(character.isdigit() for character in response) / len(response) if response else 0.0
