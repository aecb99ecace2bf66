"""Implements GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3) with the token loss of `surrogate.py`."""

import torch

from trainer.algorithms.surrogate import Surrogate
from trainer.batch import Batch
from trainer.functional.advantages import group_normalised


class Grpo(Surrogate):
    """Group-normalised advantages; mean over the tokens of a sample, then over the samples."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return (r - mean) / (std + advantage_eps) within the group, float32 [N]."""
        return group_normalised(rewards, group_index, self.config.advantage_eps)

    def token_weights(self, batch: Batch) -> torch.Tensor:
        """Return 1 / (N |o_i|) for each trained token of sample i, float32 [N, L].

        This is the 1/G sum_i 1/|o_i| sum_t of eq. 3 over all groups of the batch. |o_i| counts all *sampled*
        tokens of sample i, also those that the bound masked: masking removes a token's share and gives it to
        no other, so that the few fresh tokens of a late sample do not weigh more than they would have on
        time. N counts all samples, so groups of unequal size weigh by their size.
        """
        counts = batch.sampled_mask.sum(dim=1, keepdim=True).clamp_min(1)
        return batch.loss_mask.float() / (counts * max(len(counts), 1))
