"""Computes attention over packed sequences by segments, on any device and in any dtype.

A segment is a run of sequences of similar length, padded to its longest for one call of torch's attention. So
long sequences waste little, and many short ones take few calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from trainer.layers.attention.softcapped import softcapped_attention

SIMILAR = 0.75
"""The shortest sequence of a segment has at least this share of the longest one's tokens, or"""
CLOSE = 8
"""at most so many tokens less."""


@dataclass(frozen=True, slots=True)
class AttentionSegment:
    """A run of sequences."""

    first: int
    """Its first token in the micro-batch."""
    tokens: int
    sequences: int
    longest: int
    padded: torch.Tensor | None
    """int64 [sequences * longest]: for each place of the padded segment a token, counted from `first`; the
    last one of its sequence in the padding. None if all sequences are equally long."""
    places: torch.Tensor | None
    """int64 [tokens]: the place of each token."""


def segments_of(lengths: Sequence[int], device: torch.device) -> tuple[AttentionSegment, ...]:
    """Divide sequences into segments, in their order."""
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
        v: shaped as `k`.
        segments: of the T tokens.
        scale: of the scores; None: 1 / sqrt(D).
        window: tokens that each one attends to, itself included; 0: all before it.
        softcap: bound of the scores; 0: none.
        sinks: [heads], scores to which attention goes that no token gets.
    """
    return torch.cat([_attend(q, k, v, segment, scale, window, softcap, sinks) for segment in segments])


def window_mask(tokens: int, window: int, device: torch.device) -> torch.Tensor | None:
    """Return bool [tokens, tokens], true where a query attends to a key; None if causality says it all."""
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
    """Return causal attention of sequences of one length, [n, heads, length, D]; see `segmented_attention`.

    Args:
        q: [n, heads, length, D].
        k: [n, kv heads, length, D].
        v: shaped as `k`.
        scale: of the scores.
        window: of each token.
        softcap: of the scores.
        sinks: of the heads; none where scores have a bound.
    """
    if softcap:
        return softcapped_attention(q, k, v, scale=scale, window=window, softcap=softcap)
    mask = window_mask(q.size(2), window, q.device)
    if sinks is not None:
        # A sink is a key whose score is given, and whose value is zero.
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        mask = _with_sinks(_mask(q.size(2), window, q.device), sinks.to(q.dtype))
    grouped = q.size(1) != k.size(1)
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    segment: AttentionSegment,
    scale: float | None,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    def spread(x: torch.Tensor) -> torch.Tensor:
        x = x.narrow(0, segment.first, segment.tokens)
        if segment.padded is not None:
            x = x.index_select(0, segment.padded)
        return x.unflatten(0, (segment.sequences, segment.longest)).transpose(1, 2)

    out = causal_attention(spread(q), spread(k), spread(v), scale, window, softcap, sinks)
    out = out.transpose(1, 2).flatten(0, 1)
    return out if segment.places is None else out.index_select(0, segment.places)


def _with_sinks(mask: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the bias of the scores of n queries, [heads, n, n + 1]: the sinks are the last column."""
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
