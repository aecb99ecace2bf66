"""A verifier that fails for some prompts: it raises where the answer is 9, else scores like `exact_match`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    """None."""


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """1 for the right answer; raises for prompts whose answer is 9."""
    if str(metadata["answer"]) == "9":
        raise RuntimeError("nine is not for me")
    return float(response.strip() == str(metadata["answer"]))
