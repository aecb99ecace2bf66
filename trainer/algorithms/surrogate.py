"""Implements the token loss that GRPO and related algorithms share.

The loss has a clipped surrogate, off-policy corrections, an entropy bonus and a KL penalty.
"""

from dataclasses import dataclass

import torch

from trainer.algorithms.base import TokenLoss
from trainer.batch import TrainedTokens
from trainer.config import AlgorithmConfig
from trainer.functional.losses import (
    clipped_surrogate,
    k1_kl,
    k2_kl,
    k3_kl,
    keep_mask,
    probability_ratio,
    truncated_weight,
)
from trainer.functional.weights import token_mean

KL = {"k1": k1_kl, "k2": k2_kl, "k3": k3_kl}
"""`algorithm.kl_estimator` -> function that computes the estimate."""


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Base class of algorithms with this token loss. Subclasses add advantages and may override weights."""

    config: AlgorithmConfig

    def sample_weights(self, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Return 1 / sum_i |o_i| for every trained token, float32 [N]: the mean over all tokens."""
        return token_mean(sampled_tokens)

    def token_loss(
        self, tokens: TrainedTokens, logprobs: torch.Tensor, entropy: torch.Tensor | None = None
    ) -> TokenLoss:
        """Return the unreduced loss of each token; all arrays are float32 [k].

            old  = pi_proximal if the objective is decoupled, else pi_behaviour
            w    = min(pi_proximal / pi_behaviour, importance_cap)
                   if the objective is decoupled and importance_cap > 0, else 1
            m    = 1 where pi_start / pi_behaviour is between rejection_low and rejection_high, else 0
                   if rejection_level is set, else 1
            loss = w m policy_loss(pi / old, A) - entropy_coef * entropy + kl_coef * KL(pi, pi_ref)

        With use_kl_in_reward, the KL term is part of the rewards, and so of A, instead of the loss.

        pi_start is the policy at the start of the step, equal to pi in the first update. The decoupled
        objective is from Hilton et al. 2021 (arXiv 2110.00641). Terms whose coefficient is 0, or whose
        array is missing, are omitted.
        """
        config, proximal, behaviour = self.config, tokens.proximal_logprobs, tokens.behaviour_logprobs
        ratio = self.ratio(tokens, logprobs, behaviour if proximal is None else proximal)
        loss, clipped = self.policy_loss(tokens, ratio, logprobs)
        if proximal is not None and config.importance_cap > 0:
            loss = loss * truncated_weight(
                proximal - behaviour, config.importance_level, config.importance_cap, tokens.over_samples
            )
        started = (logprobs if tokens.start_logprobs is None else tokens.start_logprobs).detach()
        if config.rejection_level:
            loss = loss * keep_mask(
                started - behaviour,
                config.rejection_level,
                config.rejection_low,
                config.rejection_high,
                tokens.over_samples,
            )
        if entropy is not None:
            bonus = config.entropy_coef if tokens.entropy_coef is None else tokens.entropy_coef
            loss = loss - bonus * entropy
        if config.kl_coef and not config.use_kl_in_reward and tokens.reference_logprobs is not None:
            loss = loss + config.kl_coef * KL[config.kl_estimator](logprobs, tokens.reference_logprobs)
        with torch.no_grad():
            compared = self.ratio(tokens, started, behaviour)
            outside = self.policy_loss(tokens, compared, started)[1]
        return TokenLoss(loss=loss, ratio=ratio, clipped=clipped, behaviour_clipped=outside)

    def ratio(self, tokens: TrainedTokens, logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """Return pi / old of each token, [k]."""
        return probability_ratio(logprobs, old)

    def policy_loss(
        self, tokens: TrainedTokens, ratio: torch.Tensor, logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return PPO's clipped surrogate as (loss, clipped) of each token, both [k]."""
        return clipped_surrogate(ratio, tokens.advantages, self.config.clip_low, self.config.clip_high)
