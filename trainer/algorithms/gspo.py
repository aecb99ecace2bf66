"""Implements GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 5) with the token loss of `surrogate.py`.

The loss of token t is -min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A). `grpo.py` computes A and the
token weights, `surrogate.py` clips, `trainer/step/loss.py` sums. This module computes s_t. The paper has
narrow clips: clip_low 3e-4 and clip_high 4e-4.
"""

import torch

from trainer.algorithms.grpo import Grpo
from trainer.batch import TrainedTokens
from trainer.functional.losses import MAX_LOG_RATIO


class Gspo(Grpo):
    """GRPO with one ratio for all tokens of a sample, which clips whole samples instead of tokens."""

    def ratio(self, tokens: TrainedTokens, logprobs: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """Return s_i = (pi(o_i) / old(o_i))^(1 / |o_i|), [k], over the trained tokens of sample i (eq. 7).

        The gradient of every token of sample i flows through s_i.
        """
        log_ratio = tokens.over_samples(logprobs - old) / tokens.over_samples(torch.ones_like(old))
        return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
