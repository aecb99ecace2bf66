"""Implements M2PO (Zheng et al. 2025, arXiv 2510.01161) with the token loss of `surrogate.py`.

Its trust region is `second_moment_threshold`, 0.04 in AReaL's example: tokens whose policy has moved the most
since they were sampled are left out, and no ratio is clipped.
"""

import torch

from trainer.algorithms.dapo import Dapo


class M2po(Dapo):
    """GRPO's advantages, the mean over all tokens, the ratio without a clip."""

    def policy_loss(
        self, ratio: torch.Tensor, logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return -ratio A of each token, and zeros, both [k]."""
        return -ratio * advantages, torch.zeros_like(ratio)
