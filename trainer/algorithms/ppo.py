"""Implements PPO (Schulman et al. 2017, arXiv 1707.06347) with a critic and the token loss of `surrogate.py`.

`trainer/functional/advantages.py` estimates the advantage of each token from the critic's values, once per
batch (`trainer/roles/advantages.py`).
"""

import torch

from trainer.algorithms.surrogate import Surrogate


class Ppo(Surrogate):
    """Advantages from a critic; the mean over all tokens. A group may have one sample."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return the rewards, float32 [N]: placeholders in the step's plan until the critic's estimate."""
        return rewards.float()
