"""The share of characters that stand in the right place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reward.verifiers.registry import required


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `positions`."""

    key: str = "answer"
    strip: bool = True
    """Ignore white space around response and answer."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """Matching positions over the longer of the two lengths, so that rambling costs."""
    answer = str(required(metadata, options.key))
    if options.strip:
        response, answer = response.strip(), answer.strip()
    longest = max(len(response), len(answer))
    return sum(a == b for a, b in zip(response, answer, strict=False)) / longest if longest else 1.0
