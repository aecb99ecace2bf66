"""Decodes with a transformers model: one token per row and step, using the row's KV cache if there is one."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from rollout.engines.hf.routed_experts import ExpertRecorder
from rollout.engines.hf.row_adapters import RowAdapters
from rollout.engines.in_process.running_request import Decoder, RunningRequest, take_tokens


class HfDecoder:
    """Base of decoders for transformers models."""

    def __init__(
        self,
        model: torch.nn.Module,
        recorder: ExpertRecorder | None = None,
        adapters: RowAdapters | None = None,
    ) -> None:
        """Create a decoder.

        Args:
            recorder: recorder of routed experts, if wanted.
            adapters: named adapters of the model's layers, if any.
        """
        self._model: Any = model
        self._recorder, self._adapters = recorder, adapters
        self._device = next(model.parameters()).device

    def forget(self, rows: Sequence[RunningRequest]) -> None:
        """Drop the KV cache of rows."""
        for row in rows:
            row.kv = None


class PaddingDecoder(HfDecoder):
    """Decoder that pads the KV caches of all rows to one batch at every step.

    `RunningRequest.kv` holds keys and values of the prompt and of all tokens but the last.
    """

    @torch.no_grad()
    def step(self, rows: Sequence[RunningRequest], version: int) -> None:
        """Sample one token per row: prefill new rows in one batch, decode the others in another."""
        fresh = [row for row in rows if row.kv is None]
        for batch, forward in (
            (fresh, self._prefill),
            ([row for row in rows if row.kv is not None], self._decode),
        ):
            if not batch:
                continue
            if self._adapters is not None:
                self._adapters.choose([row.request.adapter for row in batch])
            take_tokens(batch, forward(batch), version)

    def _prefill(self, rows: list[RunningRequest]) -> torch.Tensor:
        """Compute prompts, right-padded so that causal masking hides the padding; return logits [N, V]."""
        ids = [row.ids for row in rows]
        longest = max(map(len, ids))
        padded = torch.tensor([i + [0] * (longest - len(i)) for i in ids], device=self._device)
        last = torch.tensor([len(i) - 1 for i in ids], device=self._device)
        kept, where = last.unique(return_inverse=True)
        cache = DynamicCache()
        logits = self._model(padded, past_key_values=cache, use_cache=True, logits_to_keep=kept).logits
        if self._recorder is not None:
            chosen = self._recorder.take()
            for row, experts in zip(rows, np.split(chosen, len(rows)), strict=True):
                row.record(0, experts[: len(row.ids)])
        for n, row in enumerate(rows):
            row.kv = [
                (layer.keys[n, :, : len(ids[n])], layer.values[n, :, : len(ids[n])]) for layer in cache.layers
            ]
        return torch.stack([logits[n, where[n]] for n in range(len(rows))])

    def _decode(self, rows: list[RunningRequest]) -> torch.Tensor:
        """Compute one token per row on left-padded KV; return logits [N, V]."""
        kvs = [row.kv for row in rows if row.kv is not None]
        lengths = [kv[0][0].shape[1] for kv in kvs]
        longest = max(lengths)
        cache = DynamicCache()
        for layer in range(len(kvs[0])):
            keys, values = (torch.stack([_left_pad(kv[layer][i], longest) for kv in kvs]) for i in (0, 1))
            cache.update(keys, values, layer)
        mask = torch.tensor([[0] * (longest - n) + [1] * (n + 1) for n in lengths], device=self._device)
        ids = torch.tensor([[row.tokens[-1]] for row in rows], device=self._device)
        positions = torch.tensor([[n] for n in lengths], device=self._device)
        logits = self._model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        ).logits
        if self._recorder is not None:
            for row, length, experts in zip(rows, lengths, self._recorder.take(), strict=True):
                row.record(length, experts[None])
        for n, row in enumerate(rows):
            first = longest - lengths[n]
            row.kv = [(layer.keys[n, :, first:], layer.values[n, :, first:]) for layer in cache.layers]
        last: torch.Tensor = logits[:, -1]
        return last


def _left_pad(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, length - tensor.shape[1], 0))


class RowDecoder(HfDecoder):
    """Decoder with one forward pass per row. `RunningRequest.kv` holds the row's transformers cache."""

    @torch.no_grad()
    def step(self, rows: Sequence[RunningRequest], version: int) -> None:
        """Sample one token per row, with one forward pass per row."""
        for row in rows:
            take_tokens([row], self._logits(row)[None], version)

    def _logits(self, row: RunningRequest) -> torch.Tensor:
        """Compute the new tokens of a row; return logits [V] for its next token."""
        ids, first = row.ids, 0
        if row.kv is None:
            row.kv = empty_cache(self._model)
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


class WholeDecoder(HfDecoder):
    """Decoder without a cache: each step recomputes a row from its first token."""

    @torch.no_grad()
    def step(self, rows: Sequence[RunningRequest], version: int) -> None:
        """Sample one token per row, recomputing the row from its first token."""
        for row in rows:
            if self._adapters is not None:
                self._adapters.choose([row.request.adapter])
            tokens = torch.tensor([row.ids], device=self._device)
            logits = self._model(tokens, use_cache=False).logits
            if self._recorder is not None:
                row.record(0, self._recorder.take())
            take_tokens([row], logits[:, -1], version)


def decoder_of(model: Any, *, row_by_row: bool = False) -> Callable[..., Decoder]:
    """Return the fastest exact decoder for a model; `row_by_row`: one forward pass per row.

    Models without `position_ids` derive positions from the place in the row, including padding.
    """
    arguments = inspect.signature(model.forward).parameters
    if "past_key_values" not in arguments:
        return WholeDecoder
    padded = "position_ids" in arguments and not row_by_row and not has_state(model)
    return PaddingDecoder if padded else RowDecoder


def empty_cache(model: Any) -> DynamicCache:
    """Return an empty cache with each layer's kind of state.

    For encoder-decoder configurations a plain cache is used, because the configuration counts encoder layers,
    which are not computed here.
    """
    return DynamicCache() if hasattr(model.config, "encoder_layers") else DynamicCache(config=model.config)


def has_state(model: Any) -> bool:
    """Return whether some layers keep a recurrent state instead of keys and values."""
    layers = empty_cache(model).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
