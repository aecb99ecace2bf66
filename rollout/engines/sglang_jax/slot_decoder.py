"""Decodes with a model that keeps keys and values in slots of one length, a running request each."""

from collections.abc import Iterator, Sequence, Set
from typing import Protocol

import numpy as np
import torch

from rollout.engines.in_process.running_request import RunningRequest


class Slots(Protocol):
    """Model with a KV cache of slots; those in use are the first ones."""

    def prefill(self, first: int, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Fill the slots from `first` on, one for each sequence; returns logits [N, V] after its end."""

    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Append a token to each of the B slots in use; returns logits [B, V] after it.

        Args:
            tokens: one for each slot.
            lengths: tokens that each slot holds before.
        """

    def experts_of_pass(self, sequences: int) -> torch.Tensor | None:
        """Return the experts of the last pass, int64 [S, N, layers with experts, k] on the host.

        S tokens of each of N `sequences`, 1 of each slot in use if it was not a prefill. None if they are not
        recorded.
        """

    def move(self, source: int, target: int) -> None:
        """Make slot `target` hold what slot `source` holds, which is free afterwards."""


class SlotDecoder:
    """Decoder that keeps the KV cache of rows in the slots of a model.

    Slot i holds the KV of the i-th row in `_held`, of all its tokens but the last.
    """

    def __init__(self, model: Slots, batch_tokens: int) -> None:
        """Use the slots of `model`, with at most `batch_tokens` tokens in a prefill, padding included."""
        self._model = model
        self._batch_tokens = batch_tokens
        self._held: list[RunningRequest] = []
        """Row of each slot in use."""

    def step(self, rows: Sequence[RunningRequest], version: int) -> None:
        """See `Decoder`."""
        self._drop_all_but(set(rows))
        held = list(self._held)
        if held:
            logits = self._model.decode([row.tokens[-1] for row in held], [len(row.ids) - 1 for row in held])
            self._record(held, [(len(row.ids) - 1, 1) for row in held])
            for row, row_logits in zip(held, logits, strict=True):
                row.take(row_logits, version)
        for batch in self._batches(set(rows).difference(held)):
            logits = self._model.prefill(len(self._held), [row.ids for row in batch])
            self._record(batch, [(0, len(row.ids)) for row in batch])
            self._held += batch
            for row, row_logits in zip(batch, logits, strict=True):
                row.take(row_logits, version)

    def forget(self, rows: Sequence[RunningRequest]) -> None:
        """See `Decoder`."""
        self._drop_all_but(set(self._held).difference(rows))

    def _record(self, rows: Sequence[RunningRequest], places: Sequence[tuple[int, int]]) -> None:
        """Record the experts of the last pass, if they are; `places` are first and number of its inputs."""
        chosen = self._model.experts_of_pass(len(rows))
        if chosen is None:
            return
        for row, (first, count), experts in zip(rows, places, chosen.unbind(1), strict=True):
            row.record(first, experts[:count].numpy().astype(np.uint16))

    def _drop_all_but(self, rows: Set[RunningRequest]) -> None:
        """Free the slots of other rows; the last slot in use moves into each gap."""
        slot = 0
        while slot < len(self._held):
            if self._held[slot] in rows:
                slot += 1
                continue
            last = self._held.pop()
            if slot < len(self._held):
                self._held[slot] = last
                self._model.move(len(self._held), slot)

    def _batches(self, rows: Set[RunningRequest]) -> Iterator[list[RunningRequest]]:
        """Yield batches of rows of similar lengths, so that little is padded."""
        batch: list[RunningRequest] = []
        for row in sorted(rows, key=lambda row: len(row.ids)):
            if (len(batch) + 1) * len(row.ids) > self._batch_tokens and batch:
                yield batch
                batch = []
            batch.append(row)
        if batch:
            yield batch
