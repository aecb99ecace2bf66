"""Scores every response with the same value, for algorithms without rewards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `constant`."""

    value: float = 0.0
    """The score."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Return the value."""
    return options.value
