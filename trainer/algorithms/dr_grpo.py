"""Implements Dr. GRPO with the token loss of `surrogate.py`.

Liu et al. 2025, "Understanding R1-Zero-like training" (arXiv 2503.20783).
"""

import torch

from trainer.algorithms.surrogate import Surrogate
from trainer.batch import Batch
from trainer.functional.advantages import group_centred


class DrGrpo(Surrogate):
    """Centred advantages; every token weighs the same, whatever the length of its sample."""

    def advantages(self, rewards: torch.Tensor, group_index: torch.Tensor) -> torch.Tensor:
        """Return r - mean within the group, float32 [N]."""
        return group_centred(rewards, group_index)

    def token_weights(self, batch: Batch) -> torch.Tensor:
        """Return 1 / (N M) for each trained token, float32 [N, L].

        M is `length_normalizer`, a constant such as the generation limit (the paper's MAX_TOKENS). If that is
        0, M is the number of sampled tokens of the batch's longest sample: constant within a step, but not
        from step to step.
        """
        budget = self.config.length_normalizer or max(int(batch.sampled_mask.sum(dim=1).max()), 1)
        return batch.loss_mask.float() / (budget * len(batch.loss_mask))
