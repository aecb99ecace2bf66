"""Limits of what layers keep on a device at a time. The expected memory reads them without torch."""

from dataclasses import dataclass

LOGITS_CHUNK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Device -> size of a chunk of logits."""
LOGITS_KEPT_BYTES = {"cpu": 1 << 30, "cuda": 6 << 30}
"""Device -> size of a micro-batch's logits up to which they are kept for the backward pass. Larger ones are
computed again: a third more arithmetic in the output layer, which has most of a small model's."""
LOGITS_MOST_BYTES = max(LOGITS_KEPT_BYTES["cuda"], 2 * LOGITS_CHUNK_BYTES["cuda"])
"""Memory that logits take on a GPU at most: kept ones, or a chunk and the one before it."""
SCORES_CHUNK_BYTES = 1 << 28
"""Bounded attention scores in float32 at a time, unless the scores of one query of each head take more."""


@dataclass(frozen=True, slots=True)
class KeyCopies:
    """Copies of keys and values that lie before what sequences do not share."""

    share: float = 0.0
    """Memory of a copy of a token's key and value in a layer, in tokens of a micro-batch."""
    window: int = 0
    """Tokens that each token sees, itself included; 0: all before it."""


NO_COPIES = KeyCopies()
