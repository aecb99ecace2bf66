"""Implements Dr. GRPO with the token loss of `surrogate.py`.

Liu et al. 2025, "Understanding R1-Zero-like training" (arXiv 2503.20783).
"""

import torch

from trainer.algorithms.surrogate import Surrogate
from trainer.functional.advantages import group_centred
from trainer.functional.weights import constant


class DrGrpo(Surrogate):
    """Centred advantages. Every token of the batch weighs the same, independent of its sample's length."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return r - mean within the group, float32 [N]."""
        return group_centred(rewards, group_index)

    def sample_weights(self, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Return 1 / (N M) for every trained token, float32 [N].

        M is `length_normalizer`, a constant such as the generation limit (the paper's MAX_TOKENS). With
        `length_normalizer` 0, M is the number of sampled tokens of the batch's longest sample. M is then
        constant only within a step.
        """
        return constant(sampled_tokens, self.config.length_normalizer)
