"""Keeps a verifier's counts and text of one call: for metrics, and for the record of the sample."""

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass(slots=True)
class Notes:
    """Filled by the verifier while it scores, so that they are there even if it fails or is too slow."""

    counts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """What happened -> how often, or how much: `requests`, `retries`, `prompt_tokens`, `cost` ..."""
    text: str = ""
    """A judge's answer."""
    problem: str = ""
    """What went wrong last."""
