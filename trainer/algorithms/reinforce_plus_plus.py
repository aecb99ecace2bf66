"""Implements REINFORCE++ and its variant with a baseline (Hu et al. 2025, arXiv 2501.03262).

Rewards are whitened over the tokens of the batch (`trainer/roles/advantages.py`), where a penalty in the
reward covers each token and the later ones. The token loss is `surrogate.py`'s.
"""

import torch

from trainer.algorithms.surrogate import Surrogate
from trainer.functional.advantages import group_centred


class ReinforcePlusPlus(Surrogate):
    """Rewards, whitened over all tokens of the batch; the mean over all tokens. A group may be one sample."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return the rewards, float32 [N], before whitening."""
        return rewards.float()


class ReinforcePlusPlusBaseline(ReinforcePlusPlus):
    """Subtracts the mean of the group from rewards before."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return the group-centred rewards, float32 [N], before whitening."""
        return group_centred(rewards, group_index)
