"""Dr. GRPO: Liu et al. 2025, "Understanding R1-Zero-like training" (arXiv 2503.20783), with the token loss of `surrogate.py`."""

from dataclasses import dataclass

import torch

from trainer.algorithms.base import TokenLoss
from trainer.algorithms.surrogate import surrogate_token_loss
from trainer.batch import Batch
from trainer.config import AlgorithmConfig
from trainer.functional.advantages import group_centred


@dataclass(frozen=True, slots=True)
class DrGrpo:
    """Centred advantages; every token weighs the same, whatever the length of its sample."""

    config: AlgorithmConfig

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """r - mean within the group; float32 [N]."""
        return group_centred(rewards, group_index)

    def token_weights(self, batch: Batch) -> torch.Tensor:
        """weight = 1 / (N M), float32 [N, L].

        M is `length_normalizer`, a constant such as the generation limit (the paper's MAX_TOKENS). If that is 0, M is the number of
        sampled tokens of the batch's longest sample: constant within a step, but not from step to step.
        """
        budget = self.config.length_normalizer or max(int(batch.sampled_mask.sum(dim=1).max()), 1)
        return batch.loss_mask.float() / (budget * len(batch.loss_mask))

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
        """See `surrogate_token_loss`."""
        return surrogate_token_loss(
            self.config,
            logprobs,
            behaviour_logprobs,
            advantages,
            entropy=entropy,
            proximal_logprobs=proximal_logprobs,
            reference_logprobs=reference_logprobs,
        )
