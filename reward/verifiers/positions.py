"""Scores the fraction of characters at the right position."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reward.verifiers.registry import required_text


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `positions`."""

    key: str = "answer"
    """Field of the metadata with the answer."""
    strip: bool = True
    """Ignore white space around response and answer."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Return matching positions / longer length, 0 to 1. A longer response scores less.

    Raises:
        RewardError: the metadata has no answer.
    """
    answer = required_text(metadata, options.key)
    if options.strip:
        response, answer = response.strip(), answer.strip()
    longest = max(len(response), len(answer))
    return sum(a == b for a, b in zip(response, answer, strict=False)) / longest if longest else 1.0
