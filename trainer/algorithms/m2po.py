"""Implements M2PO (Zheng et al. 2025, arXiv 2510.01161) with the token loss of `surrogate.py`.

Its trust region is `second_moment_threshold`, 0.04 in the paper: a bound of the second moment of log ratios,
from which the clip of each update follows. `clip_low` and `clip_high` are the least clip, 0.3 and 0.5 in the
authors' code.
"""

import math

import torch

from trainer.algorithms.dapo import Dapo
from trainer.batch import TrainedTokens
from trainer.functional.losses import clipped_surrogate


class M2po(Dapo):
    """GRPO's advantages, the mean over all tokens, a clip that the batch decides."""

    def policy_loss(
        self, tokens: TrainedTokens, ratio: torch.Tensor, logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (loss, clipped) of each token, both [k]: PPO's, with edges exp(-limit) and exp(limit)."""
        limit = math.inf if tokens.log_ratio_limit is None else tokens.log_ratio_limit
        low = max(1 - math.exp(-limit), self.config.clip_low)
        high = max(math.exp(limit) - 1, self.config.clip_high)
        return clipped_surrogate(ratio, tokens.advantages, low, high)
