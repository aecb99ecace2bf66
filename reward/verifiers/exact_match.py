"""Scores 1 if the response equals the answer as text, else 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reward.verifiers.registry import required_text


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `exact_match`."""

    key: str = "answer"
    """Field of the metadata with the answer."""
    strip: bool = True
    """Ignore white space around response and answer."""
    ignore_case: bool = False


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Return 1 if response and answer are equal, else 0.

    Raises:
        RewardError: the metadata has no answer.
    """
    answer = required_text(metadata, options.key)
    return float(_normal(response, options) == _normal(answer, options))


def _normal(text: str, options: Options) -> str:
    text = text.strip() if options.strip else text
    return text.casefold() if options.ignore_case else text
