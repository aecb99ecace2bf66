"""Holds keys and values in pages of a few tokens, so that a sequence takes memory as it grows.

megatron-core's dynamic context is paged too, but it allocates on CUDA alone, its attention is flash-attn's
kernels, and it has neither sinks nor windows that differ by layer. So its static context is the interface to
the model here, and the memory behind it is this module's.

Shapes: N sequences, S tokens of the longest; B sequences that get one token each; P pages of the longest of
them; E the shape of one entry of a token in a layer.
"""

import math
from collections.abc import Sequence

import torch
from megatron.core.inference.contexts import StaticInferenceContext

from trainer.megatron.families.numbers import Architecture
from trainer.megatron.layers.attention.rotary import Angles, Rotary

PAGE = 16
"""Tokens of a page."""


def entry_shapes(architecture: Architecture, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a token's entries in each layer, on one of so many tensor ranks.

    These are its key, rotated, and its value; with latent attention the vector that both are made of, and
    behind it the rotated part of the key, which every rank has.
    """
    if (latent := architecture.latent) is not None:
        return ((1, latent.kv_rank + latent.rope),)
    return ((architecture.kv_heads // ranks, architecture.head_dim),) * 2


def page_bytes(architecture: Architecture, itemsize: int, ranks: int = 1) -> int:
    """Return the bytes of a page in all layers, on one of so many tensor ranks."""
    return PAGE * architecture.layers * itemsize * sum(map(math.prod, entry_shapes(architecture, ranks)))


def pages_for(tokens: int) -> int:
    """Return how many pages so many tokens take."""
    return -(-tokens // PAGE)


class PagedCache(StaticInferenceContext):
    """Memory of all layers, and where the tokens of the current pass are in it.

    Contents of a page are undefined until `clear`; whoever hands it to a sequence clears it first.
    """

    def __init__(
        self, pages: int, length: int, architecture: Architecture, like: torch.Tensor, ranks: int = 1
    ) -> None:
        """Allocate all of it.

        Args:
            pages: in each layer.
            length: tokens of the longest sequence.
            architecture: the model's.
            like: a tensor of its dtype, on its device.
            ranks: tensor ranks, of which this is one.
        """
        super().__init__(pages, length)
        self.materialize_only_last_token_logits = False
        self.tensors = [
            like.new_empty((architecture.layers, pages, PAGE, *shape))
            for shape in entry_shapes(architecture, ranks)
        ]
        """[layers, pages, PAGE, *E] for each entry."""
        self._layers = [
            [(kept.flatten(0, 1), kept.flatten(1)) for kept in entries]
            for entries in zip(*(tensor.unbind() for tensor in self.tensors), strict=True)
        ]
        """For each layer its entries by tokens, [pages * PAGE, *E], and by pages, [pages, PAGE * E]."""
        self.positions = torch.empty(0)
        """int64: positions of this pass's tokens, [S, 1] in a prefill, [1, B] when sequences get one each."""
        self.angles: tuple[Angles, ...] = ()
        """Angles of these positions, for each rotary embedding; [S, 1, 1, R] or [1, B, 1, R]."""
        self._tables = torch.empty(0)
        """int64 [N, P]: pages of each sequence; short rows repeat their first page."""
        self._rows = torch.empty(0)
        """int64 [N * P]: the tables of a decode step, one after the other."""
        self._sources = torch.empty(0)
        """int64: which tokens of a prefill, flattened, are not padding."""
        self._targets = torch.empty(0)
        """int64: where each token to store goes, counted in tokens from the first page."""

    @property
    def width(self) -> int:
        """Tokens that the pages of the longest sequence of this pass hold."""
        return self._tables.size(1) * PAGE

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages, because masked entries are multiplied by 0, which keeps a NaN of an earlier use."""
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
            rotaries: the model's.
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
        """Begin a pass over one token of each of B sequences; the host does not wait for the device.

        Args:
            tables: int64 [B, P]: pages of each sequence, enough for the token too; see `_tables`.
            positions: int64 [B]: tokens that each sequence holds before it.
            rotaries: the model's.
        """
        self.enable_decode_mode()
        self._tables, self._rows = tables, tables.flatten()
        pages = self._tables.gather(1, positions[:, None] // PAGE)[:, 0]
        self._targets = pages * PAGE + positions % PAGE
        self._place(positions[None], rotaries)

    def store(self, layer: int, *entries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Store this pass's entries of a layer; returns all that its queries attend to.

        Args:
            layer: from 1.
            entries: [S, N, *E] in a prefill, [1, B, *E] when sequences get one token each.

        Returns: the entries themselves in a prefill; else [B, width, *E], of which a bias hides what does not
            belong to the sequence.
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
        """Return window -> [B, 1, 1, width] in the cache's dtype: 0 where a sequence's token attends.

        Elsewhere it is -inf. torch would make the same of a mask, in each layer.
        """
        last = self.positions[0][:, None]
        places = torch.arange(self.width, device=last.device)
        causal = places <= last
        zeros = self.tensors[0].new_zeros(causal.shape)
        shown = {window: causal & (places > last - window) if window else causal for window in windows}
        return {window: zeros.masked_fill(~mask, -torch.inf)[:, None, None] for window, mask in shown.items()}

    def _padded(self, tables: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return [N, P]; the page that fills a row is the sequence's own, so that no other's NaN is read."""
        longest = max(map(len, tables))
        rows = [[*table, *[table[0]] * (longest - len(table))] for table in tables]
        return torch.tensor(rows, device=self.tensors[0].device)

    def _place(self, positions: torch.Tensor, rotaries: Sequence[Rotary]) -> None:
        """Set the positions of the pass.

        longrope rotates all sequences as if they were as long as the longest, so that keys stay valid.
        """
        self.positions = positions
        longest = torch.full_like(positions.flatten(), self.max_sequence_length)
        self.angles = tuple(
            _shaped(rotary.angles(positions.flatten(), longest, self.tensors[0].dtype), positions)
            for rotary in rotaries
        )


def _shaped(angles: Angles, positions: torch.Tensor) -> Angles:
    """Return angles of flattened positions with the positions' shape in front."""
    cos, sin = (x.view(*positions.shape, 1, -1) for x in (angles.cos, angles.sin))
    return Angles(cos, sin, angles.interleaved)
