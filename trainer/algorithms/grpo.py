"""Implements GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3) with the token loss of `surrogate.py`."""

import torch

from trainer.algorithms.surrogate import Surrogate
from trainer.functional.advantages import group_normalised
from trainer.functional.weights import sample_mean


class Grpo(Surrogate):
    """Group-normalised advantages; mean over the tokens of a sample, then over the samples."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return (r - mean) / (std + advantage_eps) within the group, float32 [N]."""
        return group_normalised(rewards, group_index, self.config.advantage_eps)

    def sample_weights(self, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Return 1 / (N |o_i|) for the trained tokens of sample i, float32 [N].

        The weight implements 1/G sum_i 1/|o_i| sum_t of eq. 3 over all groups of the batch. N counts all
        samples, so larger groups weigh more.
        """
        return sample_mean(sampled_tokens)
