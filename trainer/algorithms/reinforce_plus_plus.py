"""Implements REINFORCE++ and its variant with a baseline (Hu et al. 2025, arXiv 2501.03262).

The token loss is that of `surrogate.py`; the penalty for leaving the initial model is in the loss, `kl_coef`.
"""

import torch

from trainer.algorithms.surrogate import Surrogate
from trainer.functional.advantages import batch_normalised, group_centred
from trainer.functional.weights import token_mean


class ReinforcePlusPlus(Surrogate):
    """Normalises rewards over the whole batch; the mean over all tokens. A group may be one sample."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return (r - mean) / (std + advantage_eps) over the batch, float32 [N]."""
        return batch_normalised(rewards, self.config.advantage_eps)

    def sample_weights(self, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Return 1 / sum_i |o_i| for every trained token, float32 [N]."""
        return token_mean(sampled_tokens)


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """Subtracts the mean of the group, before the batch is normalised."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return the group-centred rewards, normalised over the batch, float32 [N]."""
        return batch_normalised(group_centred(rewards, group_index), self.config.advantage_eps)
