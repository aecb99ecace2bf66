"""Scores a repair by a hidden line or hidden tests, which are not in the agent's sandbox."""

from typing import Any

from reward.verifiers import python_tests


def score(*, response: str, metadata: dict[str, Any]) -> float:
    """Return 1 for the correct line or number, or for a file that passes all hidden tests; else 0."""
    if metadata["rung"] in ("number", "choice", "read", "line"):
        lines = [line.strip() for line in response.strip().splitlines() if line.strip()]
        return float(bool(lines) and lines[-1] == metadata["hidden_line"])
    if response.strip() == metadata["files"]["solution.py"].strip():
        return 0.0  # the file is unchanged
    options = python_tests.Options(key="hidden_tests")
    return python_tests.score("", response, metadata, options)
