"""Defines what the attention of a layer computes beside the product of queries and keys."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """Numbers of one layer. A kernel that cannot compute one of them refuses it."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D), D being the size of a head."""
    window: int = 0
    """Tokens that each one attends to, itself included; 0: all before it."""
    sinks: bool = False
    """Whether each head has a learnt score to which attention goes that no token gets."""
