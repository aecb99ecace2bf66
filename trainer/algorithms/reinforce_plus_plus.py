"""Implements REINFORCE++ and its variant with a baseline (Hu et al. 2025, arXiv 2501.03262).

Rewards are whitened over the tokens of the batch (`trainer/roles/advantages.py`). A KL penalty in the reward
affects each token and the tokens before it. The token loss is in `surrogate.py`.
"""

import torch

from trainer.algorithms.surrogate import Surrogate
from trainer.functional.advantages import group_centred


class ReinforcePlusPlus(Surrogate):
    """Rewards whitened over all tokens of the batch; the mean over all tokens. Groups may have one sample."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return the rewards, float32 [N], before whitening."""
        return rewards.float()


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """REINFORCE++ on rewards minus the mean of the group."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return the group-centred rewards, float32 [N], before whitening."""
        return group_centred(rewards, group_index)
