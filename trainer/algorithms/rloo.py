"""Implements RLOO (Ahmadian et al. 2024, arXiv 2402.14740) with the token loss of `surrogate.py`.

On-policy, the gradient equals REINFORCE with the mean of the other samples as baseline. Off-policy, the
clipped surrogate bounds the gradient.
"""

import torch

from trainer.algorithms.surrogate import Surrogate
from trainer.functional.advantages import leave_one_out
from trainer.functional.weights import sample_sum


class Rloo(Surrogate):
    """Leave-one-out advantages within the group; the sum over the tokens of a sample."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return r_i - mean of the other samples of the group, float32 [N]."""
        return leave_one_out(rewards, group_index)

    def sample_weights(self, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Return 1 / N for every trained token, float32 [N]: the whole sample is one action."""
        return sample_sum(sampled_tokens)
