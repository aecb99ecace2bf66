"""Sums metrics over the micro-batches of a step."""

from dataclasses import dataclass

import torch

from trainer.algorithms.base import TokenLoss
from trainer.backends.base import StepStats
from trainer.batch import Batch


@dataclass(slots=True)
class StepMetrics:
    """Sums over trained tokens."""

    tokens: int = 0
    loss: float = 0.0
    """Weighted."""
    entropy: float = 0.0
    """Nats."""
    clipped: float = 0.0
    ratio: float = 0.0
    logprob_error: float = 0.0
    """Largest |recomputed - behaviour| log-probability so far, over tokens of lag 0."""

    def add(
        self, part: Batch, loss: torch.Tensor, terms: TokenLoss, logprobs: torch.Tensor, entropy: torch.Tensor
    ) -> None:
        """Add a micro-batch. `loss` is its weighted sum; `logprobs` and `entropy` are [n, L]."""
        mask = part.loss_mask
        fresh = mask & (part.versions == part.step)
        self.tokens += int(mask.sum())
        self.loss += float(loss)
        self.entropy += float(entropy[mask].sum())
        self.clipped += float(terms.clipped[mask].sum())
        self.ratio += float(terms.ratio.detach()[mask].sum())
        if fresh.any():
            self.logprob_error = max(
                self.logprob_error, float((logprobs - part.behaviour_logprobs)[fresh].abs().max())
            )

    def stats(self, grad_norm: float, skipped: str) -> StepStats:
        """Return means over the tokens that were added."""
        count = max(self.tokens, 1)
        return StepStats(
            loss=self.loss,
            grad_norm=grad_norm,
            entropy=self.entropy / count,
            clip_fraction=self.clipped / count,
            ratio_mean=self.ratio / count if self.tokens else 1.0,
            logprob_error_max=self.logprob_error,
            trained_tokens=self.tokens,
            skipped=skipped,
        )
