"""Implements PPO (Schulman et al. 2017, arXiv 1707.06347) with a critic and the token loss of `surrogate.py`.

Advantages of single tokens are estimated by `trainer/functional/advantages.py` from the critic's values, once
for a batch (`trainer/roles/advantages.py`).
"""

import torch

from trainer.algorithms.surrogate import Surrogate


class Ppo(Surrogate):
    """A critic's advantages; the mean over all tokens. A group may be one sample."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return the rewards, float32 [N], which a step's plan has in the place of the critic's estimate."""
        return rewards.float()
