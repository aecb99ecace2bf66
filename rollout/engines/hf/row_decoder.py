"""Decodes with a transformers model whose layers have a state, such as a gated delta net: one row at a time.

A state has seen every token of its row, so neither padding nor another row may go through it: each row has a
cache of its own, which a step of the row alone reads and writes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from rollout.engines.hf.routed_experts import ExpertRecorder
from rollout.engines.in_process.running_request import RunningRequest


class RowDecoder:
    """Decoder of one row a pass. `RunningRequest.kv` holds transformers' cache of the row."""

    def __init__(self, model: torch.nn.Module, recorder: ExpertRecorder | None = None) -> None:
        """Decode with a model; `recorder` as in `PaddingDecoder`."""
        self._model: Any = model
        self._recorder = recorder
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
