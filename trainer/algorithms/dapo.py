"""Implements DAPO's loss (Yu et al. 2025, arXiv 2503.14476, eq. 8) with the token loss of `surrogate.py`.

The paper's wider upper clip is `clip_high`, 0.28 there. Dynamic sampling and overlong reward shaping are not
part of the loss.
"""

import torch

from trainer.algorithms.grpo import Grpo
from trainer.functional.weights import token_mean


class Dapo(Grpo):
    """GRPO's advantages with the mean over all tokens of the batch."""

    def sample_weights(self, sampled_tokens: torch.Tensor) -> torch.Tensor:
        """Return 1 / sum_i |o_i| for every trained token, float32 [N]."""
        return token_mean(sampled_tokens)
