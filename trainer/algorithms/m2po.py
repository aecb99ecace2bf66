"""Implements M2PO (Zheng et al. 2025, arXiv 2510.01161) with the token loss of `surrogate.py`.

The trust region bounds the second moment of log ratios by `second_moment_threshold`, 0.04 in the paper. The
clip of each update follows from this bound. `clip_low` and `clip_high` are the narrowest clip, 0.3 and 0.5 in
the authors' code.
"""

import math

import torch

from trainer.algorithms.dapo import Dapo
from trainer.batch import TrainedTokens
from trainer.functional.losses import clipped_surrogate


class M2po(Dapo):
    """GRPO's advantages, the mean over all tokens, and a clip computed from the batch."""

    def policy_loss(
        self, tokens: TrainedTokens, ratio: torch.Tensor, logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return PPO's (loss, clipped), both [k], with clip edges exp(-limit) and exp(limit)."""
        limit = math.inf if tokens.log_ratio_limit is None else tokens.log_ratio_limit
        low = max(1 - math.exp(-limit), self.config.clip_low)
        high = max(math.exp(limit) - 1, self.config.clip_high)
        return clipped_surrogate(ratio, tokens.advantages, low, high)
