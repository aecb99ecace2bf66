"""A verifier that takes its time, so that a reward worker always holds something."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Options:
    seconds: float = 0.05


def score(prompt_text: str, response: str, metadata: Mapping[str, Any], options: Options) -> float:
    """1 if the response begins with the answer's first character."""
    time.sleep(options.seconds)
    return float(response[:1] == str(metadata["answer"])[:1])
