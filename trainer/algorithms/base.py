"""What an algorithm is: an advantage estimator, a per-token loss and a normalizer, chosen by name.

Shapes: N samples of the whole batch, n of a micro-batch, L tokens. The loss of a step is the plain sum over
all samples and tokens of `token_loss * weight`, where the weights are computed once from the whole batch. So
the split into micro-batches and ranks cannot change it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from trainer.batch import Batch
from trainer.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token quantities of a micro-batch, each [n, L]; only positions under the loss mask mean
    anything."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor


class Algorithm(Protocol):
    """A recipe. Pure: no state, no collectives."""

    @property
    def config(self) -> AlgorithmConfig: ...

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """float32 [N] from rewards [N] and the group of each sample [N]."""

    def token_weights(self, batch: Batch) -> torch.Tensor:
        """float32 [N, L]: weight of each token in the sum; 0 outside the loss mask."""

    def token_loss(
        self,
        logprobs: torch.Tensor,
        behaviour_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        *,
        entropy: torch.Tensor | None = None,
        proximal_logprobs: torch.Tensor | None = None,
        reference_logprobs: torch.Tensor | None = None,
    ) -> TokenLoss:
        """All [n, L]; gradients flow through `logprobs` and `entropy`."""
