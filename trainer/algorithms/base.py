"""Defines the interface of an algorithm: an advantage estimator, a per-token loss and a normalizer.

Shapes: N samples of the whole batch, k trained tokens of a micro-batch. The loss of a step is the plain sum
of `token_loss * weight` over all trained tokens. The weights are computed once, from the whole batch, so the
loss does not depend on the split into micro-batches and ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trainer.config import AlgorithmConfig

if TYPE_CHECKING:  # every reader of settings imports the registry, which must not import torch
    import torch

    from trainer.batch import TrainedTokens


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token quantities of a micro-batch, each float32 [k]."""

    loss: torch.Tensor
    """Unweighted loss of each token."""
    ratio: torch.Tensor
    """Probability ratio pi / pi_old."""
    clipped: torch.Tensor
    """1 where a clip zeroed the token's gradient or bounded its weight, else 0."""
    behaviour_clipped: torch.Tensor
    """`clipped` for the ratio of the policy at the start of the step to the engine's policy."""


class Algorithm(Protocol):
    """Training algorithm. Pure: no state, no collectives."""

    @property
    def config(self) -> AlgorithmConfig: ...

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return advantages, float32 [N].

        Args:
            rewards: [N].
            group_index: int64 [N]: group of each sample.
        """

    def sample_weights(self, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss weight of each trained token of a sample, float32 [N].

        Args:
            sampled_tokens: int64 [N]: tokens that the model sampled in each sample, trained or not.
        """

    def token_loss(
        self, tokens: TrainedTokens, logprobs: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> TokenLoss:
        """Return the loss of each trained token.

        Args:
            tokens: the k tokens. The other trained tokens of their samples are on the ranks that
                `TrainedTokens.join` sums over.
            logprobs: float32 [k], with gradient.
            entropy: float32 [k], with gradient; None if the algorithm does not need entropy.
        """
