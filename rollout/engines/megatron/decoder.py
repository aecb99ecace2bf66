"""Decodes requests with the KV cache pages of a `CachedModel`, as many concurrently as fit into memory.

Requests with pages are always the earliest arrivals. A request starts only if a page remains free for each
running request that may need more. If the next token finds no free page, the request that started last is
preempted: it returns its pages and is recomputed later. Earlier requests thus have priority over later ones.
The first request always continues, because the cache holds `max_model_len` tokens, so every request finishes.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from rollout.engines.in_process.running_request import RunningRequest, batches, take_tokens
from trainer.megatron.inference.cache import pages_for


class Paged(Protocol):
    """Model with a paged KV cache; see `CachedModel`."""

    pages: int

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages before a sequence first uses them."""

    def prefill(
        self,
        sequences: Sequence[Sequence[int]],
        tables: Sequence[Sequence[int]],
        adapters: Sequence[str] = (),
    ) -> torch.Tensor:
        """Fill the cache with N sequences; return logits [N, V] after the last token of each."""

    def decode(
        self,
        tokens: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[Sequence[int]],
        adapters: Sequence[str] = (),
    ) -> torch.Tensor:
        """Append a token to each of B sequences; return logits [B, V] after it."""

    def experts_of_pass(self, sequences: int) -> torch.Tensor | None:
        """Return the experts of the last pass; None if not recorded."""


class PagedDecoder:
    """Decoder whose rows hold page numbers (`row.kv`) for all their tokens but the last."""

    def __init__(self, model: Paged, batch_tokens: int) -> None:
        """Use all pages of `model`, with at most `batch_tokens` tokens per prefill, including padding."""
        self._model = model
        self._batch_tokens = batch_tokens
        self._free = list(range(model.pages))
        self.running = 0
        """Number of rows with pages."""

    @property
    def use(self) -> float:
        """Fraction of the pages in use."""
        return 1 - len(self._free) / self._model.pages

    def step(self, rows: Sequence[RunningRequest], version: int) -> None:
        """Decode one token for each running row, then start waiting rows while pages are free."""
        held = self._grow([row for row in rows if row.kv])
        if held:
            before = [row.length - 1 for row in held]
            tokens, tables = [row.tokens[-1] for row in held], [row.kv for row in held]
            logits = self._model.decode(tokens, before, tables, _adapters(held))
            self._record(held, [(first, 1) for first in before])
            take_tokens(held, logits, version)
        for batch in batches(self._start(held, rows[len(held) :]), self._batch_tokens):
            tables = [row.kv for row in batch]
            logits = self._model.prefill([row.ids for row in batch], tables, _adapters(batch))
            self._record(batch, [(0, row.length) for row in batch])
            take_tokens(batch, logits, version)

    def forget(self, rows: Sequence[RunningRequest]) -> None:
        """Return the pages of rows to the free list."""
        for row in rows:
            if row.kv:
                self._free += row.kv
                row.kv = None
                self.running -= 1

    def _grow(self, held: list[RunningRequest]) -> list[RunningRequest]:
        """Allocate the page for each row's next token; return the rows that still run."""
        running, grown = list(held), []
        number = 0
        while number < len(running):
            row = running[number]
            if pages_for(row.length) > len(row.kv):
                if not self._free:
                    self.forget([running.pop()])  # preempt the last row, which may be this one
                    continue
                row.kv.append(self._free.pop())
                grown.append(row)
            number += 1
        if added := [row.kv[-1] for row in grown if row.kv]:
            self._model.clear(added)
        return running

    def _start(
        self, held: Sequence[RunningRequest], waiting: Sequence[RunningRequest]
    ) -> list[RunningRequest]:
        """Allocate pages to the first waiting rows, keeping a page free for each row that may need more."""
        started: list[RunningRequest] = []
        growing = sum(len(row.kv) < _most_pages(row) for row in held)
        for row in waiting:
            needed = pages_for(row.length)
            growing += needed < _most_pages(row)
            if (held or started) and needed + growing > len(self._free):
                break  # no overtaking, even by shorter rows
            row.kv = [self._free.pop() for _ in range(needed)]
            self.running += 1
            started.append(row)
        if started:
            self._model.clear([page for row in started for page in row.kv])
        return started

    def _record(self, rows: Sequence[RunningRequest], places: Sequence[tuple[int, int]]) -> None:
        """Record the last pass's experts, if any; `places` are (first input, number of inputs) per row."""
        chosen = self._model.experts_of_pass(len(rows))
        if chosen is None:
            return
        for row, (first, count), experts in zip(rows, places, chosen.unbind(1), strict=True):
            row.record(first, experts[:count].numpy().astype(np.uint16))


def _adapters(rows: Sequence[RunningRequest]) -> list[str]:
    return [row.request.adapter for row in rows]


def _most_pages(row: RunningRequest) -> int:
    """Return the final number of pages of a row; its last token is never an input."""
    return pages_for(len(row.request.prompt) + row.request.sampling.max_tokens - 1)
