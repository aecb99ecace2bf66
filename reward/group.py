"""Defines a verifier's input, the prompt group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Verdict = float | list[float] | None
"""A verifier's verdict on a sample: a score, or one for each of its turns; None: it was too slow."""


@dataclass(frozen=True, slots=True)
class ResponseGroup:
    """One prompt and its n responses."""

    prompt: str
    """The prompt as text."""
    responses: Sequence[str]
    """[n] the samples as text."""
    metadata: Mapping[str, Any]
    """The prompt source's data about the prompt: answer, tests ..."""
    token_counts: Sequence[int]
    """[n] tokens of each sample, without the prompt; 0 for a response that no engine generated."""
    finish_reasons: Sequence[str]
    """[n] "stop", "length" or "environment"."""
    turns: Sequence[Sequence[str]] = ()
    """[n][K_i] the turns of each sample as text."""
    contexts: Sequence[Sequence[str]] = ()
    """[n][K_i] what was written to the model before each turn, since the turn before; of the first one
    without the prompt that all samples share."""
