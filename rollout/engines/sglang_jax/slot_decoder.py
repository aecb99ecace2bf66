"""Decodes with a model whose KV cache has fixed-length slots, one per running request."""

from collections.abc import Sequence, Set
from typing import Protocol

import torch

from rollout.engines.in_process.running_request import RunningRequest, batches, take_tokens


class Slots(Protocol):
    """Model with a slotted KV cache; the slots in use are the first ones."""

    def prefill(self, first: int, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Fill slots from `first` on, one per sequence; return logits [N, V] after the last tokens."""

    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Append a token to each of the B slots in use; return logits [B, V] after it.

        Args:
            tokens: token of each slot.
            lengths: number of tokens in each slot before the call.
        """

    def move(self, source: int, target: int) -> None:
        """Move the sequence in slot `source` to slot `target`; `source` becomes free."""


class SlotDecoder:
    """Decoder that keeps the KV cache of rows in a model's slots.

    Slot i holds the KV of all tokens but the last of row i in `_held`.
    """

    def __init__(self, model: Slots, batch_tokens: int) -> None:
        """Use the slots of `model`, with at most `batch_tokens` tokens per prefill, including padding."""
        self._model = model
        self._batch_tokens = batch_tokens
        self._held: list[RunningRequest] = []
        """Row of each slot in use."""

    def step(self, rows: Sequence[RunningRequest], version: int) -> None:
        """Decode one token for each running row, then prefill new rows."""
        self._drop_all_but(set(rows))
        held = list(self._held)
        if held:
            logits = self._model.decode([row.tokens[-1] for row in held], [len(row.ids) - 1 for row in held])
            take_tokens(held, logits, version)
        for batch in batches(set(rows).difference(held), self._batch_tokens):
            logits = self._model.prefill(len(self._held), [row.ids for row in batch])
            self._held += batch
            take_tokens(batch, logits, version)

    def forget(self, rows: Sequence[RunningRequest]) -> None:
        """Free the slots of rows."""
        self._drop_all_but(set(self._held).difference(rows))

    def _drop_all_but(self, rows: Set[RunningRequest]) -> None:
        """Free the slots of all other rows; the last slot in use moves into each gap."""
        slot = 0
        while slot < len(self._held):
            if self._held[slot] in rows:
                slot += 1
                continue
            last = self._held.pop()
            if slot < len(self._held):
                self._held[slot] = last
                self._model.move(len(self._held), slot)
