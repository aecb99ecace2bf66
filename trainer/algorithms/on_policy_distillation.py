"""Implements on-policy distillation with the token loss of `surrogate.py`.

Agarwal et al. 2023 (arXiv 2306.13649): reverse KL on the student's own samples. The KL is a reward of each
token with discount 0, as in Thinking Machines, "On-Policy Distillation" (2025).
"""

import torch

from trainer.algorithms.surrogate import Surrogate
from trainer.functional.advantages import group_centred


class OnPolicyDistillation(Surrogate):
    """Advantages from the teacher's log-probability of each token; the mean over all tokens."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return opd_reward_coef (r - mean of the group), float32 [N].

        The teacher's advantages are added later.
        """
        return self.config.opd_reward_coef * group_centred(rewards, group_index)
