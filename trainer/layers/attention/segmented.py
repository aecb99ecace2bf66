"""Computes attention over packed sequences by segments, on any device and in any dtype.

A segment is a run of sequences of similar length, padded to the longest, for one call of torch's attention.
Long sequences get little padding, and many short sequences need few calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trainer.layers.attention.softcapped import softcapped_attention

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
SIMILAR = 0.75
"""Minimum length of a segment's shortest sequence, as a share of the longest; see also `CLOSE`."""
CLOSE = 8
"""Length difference in tokens up to which sequences share a segment even below `SIMILAR`."""


@dataclass(frozen=True, slots=True)
class AttentionSegment:
    """Run of sequences that are padded to the same length."""

    first: int
    """Index of the first token in the micro-batch."""
    tokens: int
    sequences: int
    longest: int
    padded: torch.Tensor | None
    """int64 [sequences * longest]: token of each position of the padded segment, counted from `first`.
    Padding repeats the last token of its sequence. None if all sequences are equally long."""
    places: torch.Tensor | None
    """int64 [tokens]: position of each token in the padded segment."""

    def pad_repeat(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [T, heads, any size] padded by repetition: [sequences, heads, longest, any size]."""
        rows = rows.narrow(0, self.first, self.tokens)
        if self.padded is not None:
            rows = rows.index_select(0, self.padded)
        return rows.unflatten(0, (self.sequences, self.longest)).transpose(1, 2)

    def pad_zeros(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [T, heads, any size] padded with zeros: [sequences, heads, longest, any size]."""
        if self.places is None:
            return self.pad_repeat(rows)
        padded = rows.new_zeros(self.sequences * self.longest, *rows.shape[1:])
        padded.index_copy_(0, self.places, rows.narrow(0, self.first, self.tokens))
        return padded.unflatten(0, (self.sequences, self.longest)).transpose(1, 2)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Return the rows [tokens, heads, any size] of a padded segment without the padding."""
        rows = padded.transpose(1, 2).flatten(0, 1)
        return rows if self.places is None else rows.index_select(0, self.places)


def segments_of(lengths: Sequence[int], device: torch.device) -> tuple[AttentionSegment, ...]:
    """Split sequences into segments, keeping their order."""
    segments = []
    first = 0
    for run in _runs(lengths):
        segments.append(_segment(first, torch.tensor(run), device))
        first += sum(run)
    return tuple(segments)


def segmented_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segments: Sequence[AttentionSegment],
    scale: float | None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention within each sequence, [T, heads, D].

    Args:
        q: [T, heads, D].
        k: [T, kv heads, D].
        v: [T, kv heads, D].
        segments: segments of the T tokens.
        scale: factor of the scores; None: 1 / sqrt(D).
        window: attention window in tokens, including the token itself; 0: unlimited.
        softcap: bound of the scores; 0: unbounded.
        sinks: [heads], scores in the softmax without a value.
    """
    outputs = []
    for segment in segments:
        queries, keys, values = map(segment.pad_repeat, (q, k, v))
        outputs.append(segment.unpad(causal_attention(queries, keys, values, scale, window, softcap, sinks)))
    return torch.cat(outputs)


@dataclass(frozen=True, slots=True)
class CausalPart:
    """Causal attention within each sequence on a CPU, by segments; implements `joined.Part`."""

    segments: Sequence[AttentionSegment]
    scale: float | None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute output and log-sum-exp."""
        found = [
            (segment, FORWARD(*map(segment.pad_repeat, (q, k, v)), is_causal=True, scale=self.scale))
            for segment in self.segments
        ]
        outputs = torch.cat([segment.unpad(out) for segment, (out, _) in found])
        scores = torch.cat([segment.unpad(one[..., None]) for segment, (_, one) in found])
        return outputs, scores[..., 0].t().contiguous()

    def backward(
        self,
        out_grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        total: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients. Padding has zero gradient and contributes to no sum."""
        rows, scores = (q, k, v, out), total.t()[..., None]
        gradients = []
        for segment in self.segments:
            padded = *map(segment.pad_repeat, rows), segment.pad_repeat(scores)[..., 0]
            found = BACKWARD(segment.pad_zeros(out_grad), *padded, 0.0, True, scale=self.scale)
            gradients.append([segment.unpad(one) for one in found])
        q_grad, k_grad, v_grad = map(torch.cat, zip(*gradients, strict=True))
        return q_grad, k_grad, v_grad


@dataclass(frozen=True, slots=True)
class WholePart:
    """Non-causal attention of a sequence's queries to all its keys on a CPU; implements `joined.Part`."""

    sizes: Sequence[tuple[int, int]]
    """Number of queries and keys of each sequence."""
    scale: float | None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute output and log-sum-exp."""
        found = [FORWARD(*one, scale=self.scale) for one in self._sequences((q,), (k, v))]
        outputs, scores = zip(*found, strict=True)
        return torch.cat([out[0].transpose(0, 1) for out in outputs]), torch.cat(scores, -1)[0]

    def backward(
        self,
        out_grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        total: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute gradients."""
        gradients = []
        scores = total.t()[..., None]
        for upstream, queries, outputs, sums, *both in self._sequences((out_grad, q, out, scores), (k, v)):
            found = BACKWARD(upstream, queries, *both, outputs, sums[..., 0], 0.0, False, scale=self.scale)
            gradients.append([one[0].transpose(0, 1) for one in found])
        q_grad, k_grad, v_grad = map(torch.cat, zip(*gradients, strict=True))
        return q_grad, k_grad, v_grad

    def _sequences(
        self, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor]
    ) -> Iterator[list[torch.Tensor]]:
        """Yield, per sequence, its rows of all `queries` and `keys`, [1, heads, rows, any size]."""
        counts = zip(*self.sizes, strict=True)
        parts = [
            rows.split(sizes)
            for sizes, arrays in zip(counts, (queries, keys), strict=True)
            for rows in arrays
        ]
        for one in zip(*parts, strict=True):
            yield [rows.transpose(0, 1)[None] for rows in one]


def window_mask(tokens: int, window: int, device: torch.device) -> torch.Tensor | None:
    """Return bool [tokens, tokens], true where a query attends to a key; None if a causal mask suffices."""
    return _mask(tokens, window, device) if 0 < window < tokens else None


def _mask(tokens: int, window: int, device: torch.device) -> torch.Tensor:
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
    return seen.triu(1 - window) if window else seen


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention of sequences of one length, [n, heads, length, D].

    Args:
        q: [n, heads, length, D].
        k: [n, kv heads, length, D].
        v: [n, kv heads, length, D].
        scale, window, softcap: as in `segmented_attention`.
        sinks: [heads]; ignored with `softcap`.
    """
    if softcap:
        return softcapped_attention(q, k, v, scale=scale, window=window, softcap=softcap)
    mask = window_mask(q.size(2), window, q.device)
    if sinks is not None:
        # A sink is equivalent to a key with the given score and a zero value.
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        mask = _with_sinks(_mask(q.size(2), window, q.device), sinks.to(q.dtype))
    grouped = q.size(1) != k.size(1)
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _with_sinks(mask: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the score bias of n queries, [heads, n, n + 1], with the sinks as last column."""
    tokens = torch.zeros(mask.shape, dtype=sinks.dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    column = sinks[:, None, None].expand(-1, len(mask), 1)
    return torch.cat([tokens.expand(len(sinks), -1, -1), column], dim=-1)


def _runs(lengths: Sequence[int]) -> Iterator[list[int]]:
    run: list[int] = []
    for length in lengths:
        longest, shortest = max(run, default=length), min(run, default=length)
        longest, shortest = max(longest, length), min(shortest, length)
        if shortest < SIMILAR * longest and longest - shortest > CLOSE:
            yield run
            run = []
        run.append(length)
    if run:
        yield run


def _segment(first: int, lengths: torch.Tensor, device: torch.device) -> AttentionSegment:
    count, longest, tokens = len(lengths), int(lengths.max()), int(lengths.sum())
    if tokens == count * longest:
        return AttentionSegment(first, tokens, count, longest, None, None)
    starts, column = lengths.cumsum(0) - lengths, torch.arange(longest)
    padded = starts[:, None] + torch.minimum(column, lengths[:, None] - 1)
    places = (column < lengths[:, None]).flatten().nonzero()[:, 0]
    return AttentionSegment(first, tokens, count, longest, padded.flatten().to(device), places.to(device))
