"""Memory limits of layers on a device. The expected memory is computed from them without torch."""

from dataclasses import dataclass

LOGITS_CHUNK_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
"""Device -> size of a chunk of logits, bytes."""
LOGITS_KEPT_BYTES = {"cpu": 1 << 30, "cuda": 6 << 30}
"""Device -> largest size of a micro-batch's logits that are kept for the backward pass, bytes. Larger logits
are recomputed. That costs a third more arithmetic in the output layer, the largest part of a small model."""
LOGITS_MOST_BYTES = max(LOGITS_KEPT_BYTES["cuda"], 2 * LOGITS_CHUNK_BYTES["cuda"])
"""Maximum memory of logits on a GPU: kept logits, or two consecutive chunks."""
SCORES_CHUNK_BYTES = 1 << 28
"""Maximum size of float32 softcapped scores at a time, unless the scores of a single query are larger."""


@dataclass(frozen=True, slots=True)
class KeyCopies:
    """Copies of shared keys and values in front of the sequences that see them."""

    share: float = 0.0
    """Memory of one token's key and value copy in a layer, relative to a micro-batch token."""
    window: int = 0
    """Attention window in tokens, including the token itself; 0: unlimited."""


NO_COPIES = KeyCopies()
