"""Decodes with a transformers model one row at a time, each with a cache of its own.

Layers with a state, such as a gated delta net, need it: the state has seen every token of its row, so neither
padding nor another row may go through it. And the bits of a row are then its own, as products of matrices
round otherwise with other numbers of rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from rollout.engines.hf.routed_experts import ExpertRecorder
from rollout.engines.hf.row_adapters import RowAdapters
from rollout.engines.in_process.running_request import RunningRequest


class RowDecoder:
    """Decoder of one row a pass. `RunningRequest.kv` holds transformers' cache of the row."""

    def __init__(
        self,
        model: torch.nn.Module,
        recorder: ExpertRecorder | None = None,
        adapters: RowAdapters | None = None,
    ) -> None:
        """Decode with a model; arguments as in `PaddingDecoder`."""
        self._model: Any = model
        self._recorder, self._adapters = recorder, adapters
        self._device = next(model.parameters()).device

    @torch.no_grad()
    def step(self, rows: Sequence[RunningRequest], version: int) -> None:
        """See `Decoder`."""
        for row in rows:
            row.take(self._logits(row), version)

    def forget(self, rows: Sequence[RunningRequest]) -> None:
        """See `Decoder`."""
        for row in rows:
            row.kv = None

    def _logits(self, row: RunningRequest) -> torch.Tensor:
        """Compute the new tokens of a row; return logits [V] of its next token."""
        ids, first = row.ids, 0
        if row.kv is None:
            row.kv = DynamicCache(config=self._model.config)
        else:
            ids, first = row.ids[-1:], len(row.ids) - 1
        if self._adapters is not None:
            self._adapters.choose([row.request.adapter])
        tokens = torch.tensor([ids], device=self._device)
        logits: torch.Tensor = self._model(
            tokens, past_key_values=row.kv, use_cache=True, logits_to_keep=1
        ).logits
        if self._recorder is not None:
            row.record(first, self._recorder.take())
        return logits[0, -1]


def has_state(model: Any) -> bool:
    """Return whether transformers keeps a state of some layers, in place of keys and values."""
    layers = DynamicCache(config=model.config).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
