"""Defines the prompt group that verifiers score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Verdict = float | list[float] | None
"""Score of a sample, or one score per turn; None: the verifier timed out."""


@dataclass(frozen=True, slots=True)
class ResponseGroup:
    """One prompt and its n responses."""

    prompt: str
    """Text of the prompt."""
    responses: Sequence[str]
    """[n] text of each sample."""
    metadata: Mapping[str, Any]
    """Data about the prompt from the prompt source: answer, tests ..."""
    token_counts: Sequence[int]
    """[n] tokens of each sample, without the prompt; 0 for a response that no engine generated."""
    finish_reasons: Sequence[str]
    """[n] "stop", "length" or "environment"."""
    turns: Sequence[Sequence[str]] = ()
    """[n][K_i] text of each turn."""
    contexts: Sequence[Sequence[str]] = ()
    """[n][K_i] text added to the model's context before each turn, since the previous turn. For the first
    turn, without the prompt that all samples share."""
