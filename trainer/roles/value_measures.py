"""Computes a critic's loss over a micro-batch and its step statistics, equally in every backend.

The measurements are float64 sums over trained tokens, so no division of the batch changes a result.

Shapes: k trained tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.backends.base import StepStats
from trainer.batch import Batch, TrainedTokens
from trainer.functional.losses import clipped_value_loss

TOTALS = ("loss", "clipped", "value", "return", "return_squared", "error", "error_squared")
"""Sums over trained tokens, in the order of the vector; the loss is weighted. The error is return - value."""


@dataclass(frozen=True, slots=True)
class ValueMeasures:
    """Measurements of a batch; equal on every rank."""

    tokens: int
    """Trained tokens of the whole batch."""
    value_clip: float
    """As in `CriticConfig`."""

    @classmethod
    def of_batch(cls, batch: Batch, value_clip: float) -> "ValueMeasures":
        """Return the measures for the step of a batch, or of a replica's part."""
        return cls(batch.totals.trained_tokens, value_clip)

    def micro_batch_loss(
        self, tokens: TrainedTokens, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the micro-batch's part of the step's loss, and the vector of its measurements.

        Args:
            tokens: the k trained tokens, on the device.
            values: float32 [k], with gradient.
        """
        if tokens.values is None or tokens.returns is None:
            raise RuntimeError("a critic's loss needs the batch's values and returns")
        losses, clipped = clipped_value_loss(values, tokens.values, tokens.returns, self.value_clip)
        # the zero term keeps the graph to the parameters if a micro-batch has no trained token
        loss = (losses * tokens.weights).sum() + 0.0 * values.sum()
        returns, error = tokens.returns.double(), tokens.returns.double() - values.detach().double()
        measured = {
            "loss": loss.detach().double(),
            "clipped": clipped.detach().double(),
            "value": values.detach().double(),
            "return": returns,
            "return_squared": returns.square(),
            "error": error,
            "error_squared": error.square(),
        }
        return loss, torch.stack([measured[name].sum() for name in TOTALS])

    def join(self, vectors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """Return the sum of several micro-batches' vectors; zeros for none."""
        return torch.stack([torch.zeros(len(TOTALS), dtype=torch.float64, device=device), *vectors]).sum(0)

    def split(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a vector's sums and of its maxima, which are empty."""
        return vector, vector[:0]

    def stats(self, vector: torch.Tensor, *, grad_norm: float, skipped: str) -> StepStats:
        """Return the statistics of the whole step's vector."""
        if not self.tokens:
            return StepStats()
        total = dict(zip(TOTALS, vector.tolist(), strict=True))
        mean = {name: total[name] / self.tokens for name in TOTALS}
        spread = mean["return_squared"] - mean["return"] ** 2
        left = mean["error_squared"] - mean["error"] ** 2
        return StepStats(
            value_loss=total["loss"],
            critic_grad_norm=grad_norm,
            value_mean=mean["value"],
            return_mean=mean["return"],
            # equal returns have a spread of 0, up to rounding
            explained_variance=1 - left / spread if spread > 1e-12 * mean["return_squared"] else None,
            value_clip_fraction=mean["clipped"],
            warnings=(f"the critic's step was skipped: {skipped}",) if skipped else (),
        )
