"""Computes the loss of a critic over a micro-batch and measures its step, the same way in every backend.

Measured are sums over trained tokens, in float64, so no split of the batch changes a result.

Shapes: k trained tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer.backends.base import StepStats
from trainer.batch import Batch, TrainedTokens
from trainer.functional.losses import clipped_value_loss

TOTALS = ("loss", "clipped", "value", "return", "return_squared", "error", "error_squared")
"""Sums over trained tokens, in the vector's order; the loss is weighted. An error is return less value."""


@dataclass(frozen=True, slots=True)
class ValueMeasures:
    """Measures of a batch; equal on every rank."""

    tokens: int
    """Trained tokens of the whole batch."""
    value_clip: float
    """As in `CriticConfig`."""

    @classmethod
    def of_batch(cls, batch: Batch, value_clip: float) -> "ValueMeasures":
        """Return how to measure the step that a batch, or a replica's part of it, belongs to."""
        return cls(batch.totals.trained_tokens, value_clip)

    def micro_batch_loss(
        self, tokens: TrainedTokens, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the micro-batch's part of the step's loss, and the vector of what was measured of it.

        Args:
            tokens: the k trained tokens, on the device.
            values: float32 [k]; gradients flow through it.
        """
        if tokens.values is None or tokens.returns is None:
            raise RuntimeError("a critic's loss needs the batch's values and returns")
        losses, clipped = clipped_value_loss(values, tokens.values, tokens.returns, self.value_clip)
        # the empty sum keeps a graph to the parameters where a micro-batch trains no token
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
        """Return the vector of several micro-batches; of none it is all zeros."""
        return torch.stack([torch.zeros(len(TOTALS), dtype=torch.float64, device=device), *vectors]).sum(0)

    def split(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a vector's sums and of its maxima, of which there are none."""
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
            # returns that are all alike have a spread of 0, but for rounding
            explained_variance=1 - left / spread if spread > 1e-12 * mean["return_squared"] else None,
            value_clip_fraction=mean["clipped"],
            warnings=(f"the critic's step was skipped: {skipped}",) if skipped else (),
        )
