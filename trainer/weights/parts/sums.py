"""Adds up the sums h that prove to an engine rank what it does not receive of a version."""

from collections.abc import Callable

import torch

from protocol.device.slice_digests import slice_sums
from protocol.messages import WeightManifest
from protocol.weights.boxes import relative
from protocol.weights.slices import (
    Transfer,
    Wanted,
    rest_spans,
    sum_span,
    untouched,
    untouched_spans,
)

Numbered = Callable[[int], torch.Tensor]
"""Returns a piece, or the sums of one, by its number; waits for it."""


def rest_sums(
    manifest: WeightManifest, part: int, transfer: Transfer, published: Numbered
) -> list[torch.Tensor]:
    """Return the sums of what is not sent of pieces that are sent in part, from what was published."""
    found = []
    spans = rest_spans(manifest, part, transfer)
    for rest, (tensor, first, last) in zip(transfer.rests, spans, strict=True):
        entry, piece = manifest.tensors[tensor], manifest.parts[part].pieces[rest.piece]
        whole = published(rest.piece)
        sums = torch.zeros(last - first, dtype=torch.int64, device=whole.device)
        for box in rest.boxes:
            low, high = sum_span(entry, box)
            sums[low - first : high - first] += slice_sums(whole[relative(box, piece.box)], entry.shape, box)
        found.append(sums)
    return found


def untouched_sums(manifest: WeightManifest, wanted: Wanted, collected: Numbered) -> list[torch.Tensor]:
    """Return the sums, by tensor, of the pieces of all ranks of which nothing is wanted; on the CPU.

    Args:
        manifest: the version.
        wanted: what an engine rank wants of it.
        collected: returns the sums of a piece; they are numbered over all parts.
    """
    spans = untouched_spans(manifest, wanted)
    totals = {tensor: torch.zeros(rows, dtype=torch.int64) for tensor, _, rows in spans}
    numbers = _piece_numbers(manifest)
    for part, number in untouched(manifest, wanted):
        piece = manifest.parts[part].pieces[number]
        first, last = sum_span(manifest.tensors[piece.tensor], piece.box)
        totals[piece.tensor][first:last] += collected(numbers[part] + number)
    return [totals[tensor] for tensor, _, _ in spans]


def _piece_numbers(manifest: WeightManifest) -> list[int]:
    """Return for each part how many pieces the parts before it have."""
    numbers, total = [], 0
    for part in manifest.parts:
        numbers.append(total)
        total += len(part.pieces)
    return numbers
