"""Implements supervised fine-tuning: the negative log-likelihood of completions from the data set."""

from dataclasses import dataclass

import torch

from trainer.algorithms.base import TokenLoss
from trainer.batch import TrainedTokens
from trainer.config import AlgorithmConfig
from trainer.functional.weights import token_mean


@dataclass(frozen=True, slots=True)
class Sft:
    """-log pi of every token, with the mean over all tokens. No advantage, ratio or correction."""

    config: AlgorithmConfig

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return zeros, float32 [N]: rewards are ignored."""
        return torch.zeros_like(rewards)

    def sample_weights(self, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Return 1 / sum_i |o_i| for every trained token, float32 [N]."""
        return token_mean(sampled_tokens)

    def token_loss(
        self, tokens: TrainedTokens, logprobs: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> TokenLoss:
        """Return -log pi of each token, unreduced, [k]."""
        none = torch.zeros_like(logprobs)
        return TokenLoss(
            loss=-logprobs, ratio=torch.ones_like(logprobs), clipped=none, behaviour_clipped=none
        )
