"""Implements CISPO (MiniMax-M1, arXiv 2506.13585, section 3.1), which clips weights instead of updates."""

import torch

from trainer.algorithms.dapo import Dapo
from trainer.batch import TrainedTokens
from trainer.functional.losses import cispo_loss


class Cispo(Dapo):
    """GRPO's advantages, REINFORCE with a clipped importance weight, and the mean over all tokens.

    The paper clips only from above. Set `clip_low` near 1 for the same loss.
    """

    def policy_loss(
        self, tokens: TrainedTokens, ratio: torch.Tensor, logprobs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return -sg(clip(ratio)) A log pi of each token, and 1 where the ratio was clipped, both [k]."""
        return cispo_loss(ratio, logprobs, tokens.advantages, self.config.clip_low, self.config.clip_high)
