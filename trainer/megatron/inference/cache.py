"""Stores keys and values in pages of a few tokens, so the memory of a sequence grows with its length.

megatron-core's dynamic context is paged too, but requires CUDA and flash-attn's kernels, and supports neither
sinks nor windows that differ by layer. This module therefore implements the interface of the static context
with its own memory.

Shapes: N sequences, S tokens of the longest; B sequences with one new token each; P pages of the longest of
them; E shape of a token's entry in a layer.
"""

import math
from collections.abc import Sequence

import torch
from megatron.core.inference.contexts import StaticInferenceContext

from trainer.megatron.families.numbers import Architecture
from trainer.megatron.layers.attention.rotary import Angles, Rotary

PAGE = 16
"""Number of tokens per page."""


def entry_shapes(architecture: Architecture, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a token's entries in each layer, on one of `ranks` tensor ranks.

    The entries are the rotated key and the value. With latent attention, the single entry is the low-rank
    vector followed by the rotated part of the key, on every rank.
    """
    if (latent := architecture.latent) is not None:
        return ((1, latent.kv_rank + latent.rope),)
    return ((architecture.kv_heads // ranks, architecture.head_dim),) * 2


def page_bytes(architecture: Architecture, itemsize: int, ranks: int = 1) -> int:
    """Return the bytes of a page in all layers, on one of `ranks` tensor ranks."""
    return PAGE * architecture.layers * itemsize * sum(map(math.prod, entry_shapes(architecture, ranks)))


def pages_for(tokens: int) -> int:
    """Return the number of pages for `tokens` tokens."""
    return -(-tokens // PAGE)


class PagedCache(StaticInferenceContext):
    """KV cache of all layers, and the cache positions of the current pass.

    The contents of a page are undefined until `clear`. Callers clear a page before assigning it to a
    sequence.
    """

    def __init__(
        self, pages: int, length: int, architecture: Architecture, like: torch.Tensor, ranks: int = 1
    ) -> None:
        """Allocate the whole cache.

        Args:
            pages: number of pages per layer.
            length: tokens of the longest sequence.
            architecture: architecture of the model.
            like: tensor with the cache's dtype and device.
            ranks: number of tensor ranks.
        """
        super().__init__(pages, length)
        self.materialize_only_last_token_logits = False
        self.tensors = [
            like.new_empty((architecture.layers, pages, PAGE, *shape))
            for shape in entry_shapes(architecture, ranks)
        ]
        """[layers, pages, PAGE, *E], one tensor per entry."""
        self._layers = [
            [(kept.flatten(0, 1), kept.flatten(1)) for kept in entries]
            for entries in zip(*(tensor.unbind() for tensor in self.tensors), strict=True)
        ]
        """Views of each layer's entries, by token [pages * PAGE, *E] and by page [pages, PAGE * E]."""
        self.positions = torch.empty(0)
        """int64: positions of this pass's tokens, [S, 1] in a prefill, [1, B] in a decode step."""
        self.angles: tuple[Angles, ...] = ()
        """Angles of these positions per rotary embedding; [S, 1, 1, R] or [1, B, 1, R]."""
        self._tables = torch.empty(0)
        """int64 [N, P]: pages of each sequence; short rows repeat their first page."""
        self._rows = torch.empty(0)
        """int64 [N * P]: flattened tables of a decode step."""
        self._sources = torch.empty(0)
        """int64: indices of the non-padding tokens in a flattened prefill."""
        self._targets = torch.empty(0)
        """int64: cache position of each token to store, in tokens from the first page."""

    @property
    def width(self) -> int:
        """Capacity in tokens of the longest sequence's pages in this pass."""
        return self._tables.size(1) * PAGE

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages. Masked entries are multiplied by 0, which would keep NaNs of an earlier use."""
        index = torch.tensor(pages, device=self.tensors[0].device)
        for kept in self.tensors:
            kept.index_fill_(1, index, 0)

    def begin_prefill(
        self, tables: Sequence[Sequence[int]], lengths: Sequence[int], rotaries: Sequence[Rotary]
    ) -> None:
        """Begin a pass over the first tokens of N sequences, padded to the longest.

        Args:
            tables: pages of each sequence, enough for its tokens.
            lengths: tokens of each sequence.
            rotaries: rotary embeddings of the model.
        """
        self.enable_prefill_mode()
        self._tables = self._padded(tables)
        device = self._tables.device
        positions = torch.arange(max(lengths), device=device)[:, None]
        inside = positions < torch.tensor(lengths, device=device)
        self._sources = inside.flatten().nonzero()[:, 0]
        places = self._tables[:, positions[:, 0] // PAGE].t() * PAGE + positions % PAGE
        self._targets = places.flatten()[self._sources]
        self._place(positions, rotaries)

    def begin_decode(self, tables: torch.Tensor, positions: torch.Tensor, rotaries: Sequence[Rotary]) -> None:
        """Begin a pass over one token of each of B sequences, without synchronizing host and device.

        Args:
            tables: int64 [B, P]: pages of each sequence, with space for the new token; see `_tables`.
            positions: int64 [B]: number of cached tokens of each sequence.
            rotaries: rotary embeddings of the model.
        """
        self.enable_decode_mode()
        self._tables, self._rows = tables, tables.flatten()
        pages = self._tables.gather(1, positions[:, None] // PAGE)[:, 0]
        self._targets = pages * PAGE + positions % PAGE
        self._place(positions[None], rotaries)

    def store(self, layer: int, *entries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Store this pass's entries of a layer; return all entries that its queries attend to.

        Args:
            layer: number of the layer, from 1.
            entries: [S, N, *E] in a prefill, [1, B, *E] in a decode step.

        Returns:
            The given entries in a prefill; in a decode step [B, width, *E], of which a bias hides the entries
            outside the sequence.
        """
        kept = self._layers[layer - 1]
        if not self.is_decode_only():
            for (tokens, _), new in zip(kept, entries, strict=True):
                tokens.index_copy_(0, self._targets, new.flatten(0, 1).index_select(0, self._sources))
            return entries
        found = []
        for (tokens, pages), new in zip(kept, entries, strict=True):
            tokens.index_copy_(0, self._targets, new[0])
            found.append(pages.index_select(0, self._rows).view(new.size(1), self.width, *new.shape[2:]))
        return tuple(found)

    def biases(self, windows: set[int]) -> dict[int, torch.Tensor]:
        """Return window -> [B, 1, 1, width] in the cache's dtype: 0 where a token attends, else -inf.

        Computed once, because torch would convert a mask to this bias in each layer.
        """
        last = self.positions[0][:, None]
        places = torch.arange(self.width, device=last.device)
        causal = places <= last
        zeros = self.tensors[0].new_zeros(causal.shape)
        shown = {window: causal & (places > last - window) if window else causal for window in windows}
        return {window: zeros.masked_fill(~mask, -torch.inf)[:, None, None] for window, mask in shown.items()}

    def _padded(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return [N, P].

        Rows are padded with the sequence's own page, so NaNs of other sequences are not read.
        """
        longest = max(map(len, tables))
        rows = [[*table, *[table[0]] * (longest - len(table))] for table in tables]
        return torch.tensor(rows, device=self.tensors[0].device)

    def _place(self, positions: torch.Tensor, rotaries: Sequence[Rotary]) -> None:
        """Set the positions of the pass.

        longrope rotates all sequences as if they had the maximum length, so cached keys stay valid.
        """
        self.positions = positions
        longest = torch.full_like(positions.flatten(), self.max_sequence_length)
        self.angles = tuple(
            _shaped(rotary.angles(positions.flatten(), longest, self.tensors[0].dtype), positions)
            for rotary in rotaries
        )


def _shaped(angles: Angles, positions: torch.Tensor) -> Angles:
    """Return the angles of flattened positions, reshaped to the positions' shape."""
    cos, sin = (x.view(*positions.shape, 1, -1) for x in (angles.cos, angles.sin))
    return Angles(cos, sin, angles.interleaved)
