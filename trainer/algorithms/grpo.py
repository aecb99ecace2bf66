"""Implements GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3) with the token loss of `surrogate.py`."""

import torch

from trainer.algorithms.surrogate import Surrogate
from trainer.functional.advantages import group_normalised


class Grpo(Surrogate):
    """Group-normalised advantages; mean over the tokens of a sample, then over the samples."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return (r - mean) / (std + advantage_eps) within the group, float32 [N]."""
        return group_normalised(rewards, group_index, self.config.advantage_eps)

    def sample_weights(self, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Return 1 / (N |o_i|) for the trained tokens of sample i, float32 [N].

        This is the 1/G sum_i 1/|o_i| sum_t of eq. 3 over all groups of the batch. |o_i| counts all *sampled*
        tokens of sample i, also those that the bound masked: masking removes a token's share and gives it to
        no other, so that the few fresh tokens of a late sample do not weigh more than they would have on
        time. N counts all samples, so groups of unequal size weigh by their size.
        """
        return 1.0 / (sampled_tokens.clamp_min(1) * max(len(sampled_tokens), 1))
