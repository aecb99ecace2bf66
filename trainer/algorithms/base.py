"""What an algorithm is: an advantage estimator, a per-token loss and a normalizer, chosen by name.

Shapes: N samples of the whole batch, n of a micro-batch, L tokens. The loss of a step is the plain sum over all samples and tokens of
`token_loss * weight`, where the weights are computed once from the whole batch. So the split into micro-batches and ranks cannot change it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from trainer.batch import Batch


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """Section `[algorithm]`."""

    name: str = "grpo"
    """Module in `trainer/algorithms/`: grpo, dr_grpo."""
    clip_low: float = 0.2
    """PPO ratio clip: the ratio's lower edge is 1 - clip_low."""
    clip_high: float = 0.2
    importance_cap: float = 2.0
    """Truncated importance sampling: weight min(pi_proximal / pi_behaviour, cap) where proximal log-probabilities are recomputed; 0 is
    off."""
    entropy_coef: float = 0.0
    """Bonus for entropy, nats."""
    kl_coef: float = 0.0
    """Weight of the KL to the initial model (k3 estimator); 0 is off and costs nothing."""
    advantage_eps: float = 1e-4
    length_normalizer: int = 0
    """dr_grpo: tokens that each sample's sum is divided by, usually the generation limit; 0 takes the longest sample of the batch."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token quantities of a micro-batch, each [n, L]; only positions under the loss mask mean anything."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


class Algorithm(Protocol):
    """A recipe. Pure: no state, no collectives."""

    @property
    def config(self) -> AlgorithmConfig: ...

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """float32 [N] from rewards [N] and the group of each sample [N]."""

    def token_weights(self, batch: Batch) -> torch.Tensor:
        """float32 [N, L]: weight of each token in the sum; 0 outside the loss mask."""

    def token_loss(
        self,
        logprobs: torch.Tensor,
        behaviour_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        *,
        entropy: torch.Tensor | None = None,
        proximal_logprobs: torch.Tensor | None = None,
        reference_logprobs: torch.Tensor | None = None,
    ) -> TokenLoss:
        """All [n, L]; gradients flow through `logprobs` and `entropy`."""
