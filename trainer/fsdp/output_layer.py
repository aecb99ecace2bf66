"""Replaces a transformers model's output layer to compute log-probabilities without logits of all tokens.

Shapes: k tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from trainer.layers.head import linear_logprobs, linear_logprobs_no_grad

PROBE = (-40.0, 0.0, 9.0)
"""Logits that reveal whether a model changes the output of its output layer."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Requested tokens of a pass."""

    rows: torch.Tensor
    """int64 [k]: index of the input that predicts each token, over all rows of the pass."""
    targets: torch.Tensor
    """int64 [k]."""
    temperature: float


class OutputLayer:
    """Forward method of an output layer: returns logits, or log-probabilities of the requested tokens."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        self._layer = layer
        self._pending: Tokens | torch.Tensor | None = None
        layer.forward = self._forward  # type: ignore

    @classmethod
    def can_replace(cls, model: Any, device: torch.device) -> bool:
        """Return whether a model's logits equal its output layer's output, and the layer has no bias.

        The call replaces the model's output layer.
        """
        layer = model.get_output_embeddings()
        if not isinstance(layer, torch.nn.Linear) or layer.bias is not None:
            return False
        output = cls(layer)
        output._pending = torch.tensor([[PROBE]], device=device)
        ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
        given = model(input_ids=ids, use_cache=False).logits
        output._pending = None
        return bool(given.flatten().tolist() == list(PROBE))

    def logprobs(
        self, model: Any, inputs: dict[str, Any], tokens: Tokens
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies of tokens, float32 [k]; no entropies without gradients."""
        self._pending = tokens
        try:
            found = model(**inputs, use_cache=False).logits[0]
        finally:
            self._pending = None
        return found[0], found[-1]

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, pending = self._layer.weight, self._pending
        if pending is None:
            return F.linear(hidden, weight)
        if isinstance(pending, torch.Tensor):
            return pending
        rows = hidden.flatten(0, 1).index_select(0, pending.rows)
        facts: dict[str, Any] = {"vocabulary": len(weight), "temperature": pending.temperature}
        if not torch.is_grad_enabled():
            return linear_logprobs_no_grad(rows, weight, pending.targets, **facts)[None, None]
        return torch.stack(linear_logprobs(rows, weight, pending.targets, **facts))[None]
