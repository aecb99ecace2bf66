"""A reward of a user that does not expect any text: a worker that imports it imports nothing else."""


def score(response: str, metadata: dict[str, str]) -> float:
    """Score a response that is a number; raises for others."""
    return float(int(response) == int(metadata["answer"]))
