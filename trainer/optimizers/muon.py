"""Combines torch's Muon on the matrices of hidden layers with torch's AdamW on everything else.

Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the learning rate is AdamW's,
times 0.2 sqrt(max(rows, columns)) on a matrix, as in "Muon is Scalable for LLM Training" (arXiv 2502.16982).
"""

from collections.abc import Iterable
from typing import Any

import torch


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers of torch as one: their groups one after the other, their state by parameter."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        """Combine optimizers that have no parameter in common, before either has made a step."""
        groups: list[dict[str, Any]] = [*muon.param_groups, *adamw.param_groups]
        super().__init__(groups, {})
        self.param_groups = groups  # the same object in both, so that a value set here counts there
        muon.state = adamw.state = self.state
        self._both: tuple[torch.optim.Optimizer, ...] = (muon, adamw)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        for optimizer in self._both:
            optimizer.step()


def is_hidden_matrix(parameter: torch.Tensor, embeddings: Iterable[torch.Tensor]) -> bool:
    """Return whether Muon steps a parameter: a matrix that is not an embedding or the output layer."""
    return parameter.ndim == 2 and all(parameter is not other for other in embeddings)
