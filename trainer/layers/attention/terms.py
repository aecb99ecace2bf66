"""Defines the terms of a layer's attention other than the product of queries and keys."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionTerms:
    """Numbers of one layer. A kernel that cannot compute one of them refuses it."""

    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D), D being the size of a head."""
    window: int = 0
    """Tokens that each one attends to, itself included; 0: all before it."""
    softcap: float = 0.0
    """Bound c of the scaled scores s, which become c tanh(s / c); 0: none."""
    rope: int = 0
    """Which of the model's rotary embeddings rotates queries and keys."""
    sinks: bool = False
    """Whether each head has a learnt score to which attention goes that no token gets."""

    @property
    def joins(self) -> bool:
        """Whether attention to some keys can be joined with attention to others.

        A window ends within some keys before a piece, at another one for each query; kernels with bounded
        scores do not say their log-sum-exp.
        """
        return not (self.window or self.softcap)

    @property
    def optional(self) -> frozenset[str]:
        """Its terms that not every kernel computes."""
        return frozenset(name for name in ("softcap", "sinks") if getattr(self, name))


PLAIN = AttentionTerms()
