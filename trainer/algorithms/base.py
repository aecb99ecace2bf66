"""Defines the interface of an algorithm: an advantage estimator, a per-token loss and a normalizer.

Shapes: N samples of the whole batch, k trained tokens of a micro-batch. The loss of a step is the plain sum
of `token_loss * weight` over all trained tokens, where the weights are computed once from the whole batch. So
the split into micro-batches and ranks cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from trainer.config import AlgorithmConfig

if TYPE_CHECKING:  # the registry, which every reader of settings imports, must not import torch
    import torch

    from trainer.batch import TrainedTokens


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token quantities of a micro-batch, each float32 [k]."""

    loss: torch.Tensor
    """Loss of each token, not weighted."""
    ratio: torch.Tensor
    """Probability ratio pi / pi_old."""
    clipped: torch.Tensor
    """1 where a clip took the token's gradient or bounded its weight, else 0."""
    behaviour_clipped: torch.Tensor
    """1 where it would if the ratio were between the policy at the start of the step and the engine's."""


class Algorithm(Protocol):
    """A recipe. Pure: no state, no collectives of its own."""

    @property
    def config(self) -> AlgorithmConfig: ...

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return advantages, float32 [N], from rewards [N] and the group of each sample, int64 [N]."""

    def sample_weights(self, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Return the weight in the loss of each trained token of a sample, float32 [N].

        Args:
            sampled_tokens: int64 [N]: tokens of each sample that the model sampled, trained or not.
        """

    def token_loss(
        self, tokens: TrainedTokens, logprobs: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> TokenLoss:
        """Return the loss of each trained token.

        Args:
            tokens: the k tokens; all trained tokens of a sample are among them, or on ranks that
                `TrainedTokens.join` adds up over.
            logprobs: float32 [k]; gradients flow through it.
            entropy: float32 [k]; gradients flow through it, too; None where it is not needed.
        """
