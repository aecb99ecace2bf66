"""Implements the token loss that GRPO and its relatives share.

Clipped surrogate, truncated importance sampling, entropy bonus, KL.
"""

from dataclasses import dataclass

import torch

from trainer.algorithms.base import TokenLoss
from trainer.config import AlgorithmConfig
from trainer.functional.losses import clipped_surrogate, k3_kl, probability_ratio, truncated_importance_weight


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Base of the algorithms with this token loss, which add advantages and token weights."""

    config: AlgorithmConfig

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
        """Return the loss of each token, all arrays float32 [k], not reduced.

            old  = pi_proximal if it is given, else pi_behaviour
            w    = min(pi_proximal / pi_behaviour, importance_cap)
                   if pi_proximal is given and importance_cap > 0, else 1
            loss = w * clipped_surrogate(pi / old, A) - entropy_coef * entropy + kl_coef * k3(pi, pi_ref)

        With `proximal_logprobs` this is the decoupled objective of Hilton et al. 2021 (arXiv 2110.00641).
        Terms whose coefficient is 0, or whose array is missing, are left out.
        """
        config = self.config
        old = behaviour_logprobs if proximal_logprobs is None else proximal_logprobs
        ratio = probability_ratio(logprobs, old)
        loss, clipped = clipped_surrogate(ratio, advantages, config.clip_low, config.clip_high)
        if proximal_logprobs is not None and config.importance_cap > 0:
            loss = loss * truncated_importance_weight(
                proximal_logprobs, behaviour_logprobs, config.importance_cap
            )
        if config.entropy_coef and entropy is not None:
            loss = loss - config.entropy_coef * entropy
        if config.kl_coef and reference_logprobs is not None:
            loss = loss + config.kl_coef * k3_kl(logprobs, reference_logprobs)
        return TokenLoss(loss=loss, ratio=ratio, clipped=clipped)
